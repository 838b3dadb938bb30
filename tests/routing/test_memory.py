"""Scoring is predicted as training is: by its own pass, which takes on fake tensors what it takes on real ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.memory.commands.forward import trace_forward
from moetune.memory.report import PART_NAMES
from moetune.memory.trace import Trace
from moetune.routing.memory import Scoring
from moetune.routing.score import to_score
from moetune.run.resolve import resolve
from tests.memory.models import toy_run, write_toy
from tests.routing.measured import measure_score

LORA = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("mixtral", {"model": {"base": "nf4"}, "data": {"packing": True}}, 2),
    ("qwen2_moe", {"model": {"base": "fp32", "experts_on": "host"}, "data": {"packing": False}}, 1),
    ("gpt_oss", {"model": {"base": "int8"}, "train": {"micro_batch": 1}}, 1),
    ("deepseek_v3", {"model": {"base": "nf4"}, "train": {"expert_memory": 0}}, 3),
]


def parts(traced: Trace) -> dict[str, int]:
    return {"host": traced.host_peak, **dict(traced.parts(traced.peak).items())}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("model_type", "sections", "sources"), CASES, ids=[case[0] for case in CASES])
def test_a_pass_takes_what_is_predicted(
    model_type: str, sections: dict[str, Any], sources: int, tmp_path: Path
) -> None:
    """To the byte, part by part."""
    adapt = LORA if model_type == "mixtral" else {"router": "all"}
    config = toy_run(write_toy(tmp_path / "toy", model_type, num_hidden_layers=2), model_type, adapt, **sections)
    run = resolve(to_score(config), "cpu")
    measured, calls = measure_score(run, sources)
    answers = iter(calls)
    predicted = trace_forward(run, lambda layer, ids, experts, read: next(answers), passes=Scoring(sources))
    assert parts(predicted) == parts(measured)
    assert next(answers, None) is None
    assert predicted.host_peak > 0 or "experts_on" not in sections["model"]


@pytest.mark.full
def test_layers_that_are_alike_stand_for_each_other(tmp_path: Path) -> None:
    config = toy_run(write_toy(tmp_path / "toy", "mixtral", num_hidden_layers=6), "mixtral", LORA)
    run = resolve(to_score(config), "cuda")
    short, whole = (trace_forward(run, passes=Scoring(2), shortened=shortened) for shortened in (True, False))
    assert parts(short) == parts(whole)
    assert short.load == whole.load


def test_the_command_predicts_and_writes_nothing(
    moetune: Callable[..., Any], small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": {"path": str(small_model)}, "adapt": LORA}))
    assert moetune("score", "run.yaml", "--data", "unicode-names", "--gpu", "24GiB").code == 2
    ended = moetune("score", "run.yaml", "--predict", "--gpu", "1MiB", "--json")
    assert ended.code == 1, ended.err
    report = json.loads(ended.out)
    (rank,) = report["ranks"]
    assert not report["fits"]
    assert sum(rank[name] for name in PART_NAMES) == rank["peak_allocated"]
    assert rank["gradients"] == rank["optimizer_states"] == 0
    assert report["about"]["scores"] == "one data set"
    assert [file.name for file in tmp_path.iterdir()] == ["run.yaml"]
