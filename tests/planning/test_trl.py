"""Plans for TRL's trainers: the predictor of a search traces them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

from moetune.errors import UserError
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.commands import trl
from moetune.memory.commands.trl import trace_trl
from moetune.planning.plan import plan
from moetune.planning.predictor import Predictor
from moetune.training.trl import InTrl
from tests.training.test_trl import ADAPT, a_run, write_toy

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    return write_toy(tmp_path / "model", "mixtral")


@pytest.mark.full
def test_a_predictor_of_a_trainer_predicts_it(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once on this machine: a search that asks again reads the report from disk."""
    run = a_run(toy, ADAPT["lora"], optimizer={"name": "adamw"}, train={"accumulate": 1}, hardware={"gpu": "1GiB"})
    traced = []
    monkeypatch.setattr(trl, "trace_trl", lambda *args, **kwargs: traced.append(1) or trace_trl(*args, **kwargs))
    of_orpo = Predictor(routing=BALANCED, trainer=InTrl("orpo", '{"beta": 0.2}'))
    report = of_orpo.report(run)
    assert dict(report.about)["trainer"] == "TRL's ORPO, beta=0.2"
    assert of_orpo.report(run) == report
    assert len(traced) == 1


def test_a_plan_for_several_cards_is_refused_for_a_trainer() -> None:
    with pytest.raises(UserError, match="one rank"):
        plan("mixtral-8x7b", "l40s", count=2, trainer=InTrl("dpo"))
