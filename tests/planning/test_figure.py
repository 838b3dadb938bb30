"""A plan as a picture and a page, from predictions that are made up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.report import Parts
from moetune.memory.time.estimate import Duration, Range
from moetune.planning.candidate import Candidate
from moetune.planning.figure import plan_chart
from moetune.planning.plan import Miss, Plan
from moetune.planning.strategies import Strategy
from moetune.planning.views import plan_view
from moetune.report.page import page as rendered
from tests.report.sample import sample
from tests.report.test_page import Page


def made(trained: dict[str, int], time: Duration | None = None) -> Plan:
    candidates = []
    for number, (goal, size) in enumerate(trained.items()):
        rank = replace(sample().fullest, parts=Parts(frozen_weights=2**30 * (20 + number), trainable_weights=size))
        config = RunConfig.model_validate({"model": {"path": "<model>"}, "adapt": {}, "train": {"steps": 5}})
        about = (("trains", f"<b>{goal}</b>"), ("optimizer", "adamw"))
        report = replace(sample(), ranks=(rank,), time=time, about=about)
        goal_: Any = goal
        candidates.append(Candidate(Strategy(goal_, {}, ("bits",)), config, report, 1))
    return Plan("<model>", "44GiB", 44 << 30, tuple(candidates), tokens=7_200_000)


TRAINED = {"router": 2**21, "experts": 2**32, "lora": 2**29}


@pytest.mark.parametrize("time", [None, Duration(1000, 1e12, 1e14, Range(1, 2), {}, {}, True)])
def test_the_page_shows_names_as_text_and_speed_if_it_is_known(time: Duration | None) -> None:
    text = rendered(plan_view(made(TRAINED, time)), [plan_chart(made(TRAINED, time))])
    page = Page(text)
    assert "<model> on 44GiB (44.00 GiB)" in page.text
    assert "5 steps" in page.text
    assert "mathdefault" not in text
    assert "<b>experts</b>" in page.text
    assert ("500 to 1,000 tokens/s, estimated, 2 to 4 h" in page.text) is (time is not None)
    assert ("tokens/s, estimated" in text) is (time is not None)
    assert ("weights that train" in text) is (time is None)
    assert not [value for name, value in page.attributes if name in ("src", "href") and not value.startswith("#")]  # type: ignore[union-attr]


def test_where_nothing_fits_the_page_says_what_is_nearest() -> None:
    config = RunConfig.model_validate({"model": {"path": "m"}, "adapt": {}})
    none = replace(made({}), miss=Miss(config, sample(about=(("trains", "one expert"),)), None, ("NVIDIA H200",)))
    text = Page(rendered(plan_view(none))).text
    for said in ("nothing fits 44GiB", "nearest: one expert, 1 × 2048 tokens", "no change", "it fits NVIDIA H200"):
        assert said in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"plan{suffix}"
    plan_chart(made(TRAINED)).save(file)
    assert file.stat().st_size > 5_000
