"""The largest value that fits: with it the run fits by trace, and one notch further it does not."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetune.config.load import load_run_config
from moetune.config.recipes import recipes
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.predict import predict
from moetune.planning.predictor import Predictor
from moetune.planning.solve import axis_of, last_that_fits, solve
from moetune.run.resolve import resolve
from tests.cli.test_commands import ROOT


@pytest.mark.parametrize("shape", ["line", "curve", "steps"])
def test_the_last_that_fits_is_found_wherever_it_is(shape: str) -> None:
    heights = {"line": lambda n: 7 * n, "curve": lambda n: n * n * n, "steps": lambda n: n // 8 * 100}
    draw = random.Random(0)
    for _ in range(200):
        count, border = draw.randrange(1, 300), draw.randrange(-3, 320)
        room = heights[shape](border) if border >= 0 else -1
        asked: list[int] = []

        def predicted(number: int, room: int = room, asked: list[int] = asked) -> Any:
            asked.append(number)
            return SimpleNamespace(headroom_bytes=room - heights[shape](number), host=None)

        fits = [number for number in range(count) if heights[shape](number) <= room]
        last, reports = last_that_fits(count, predicted, draw.randrange(count))
        assert last == (fits[-1] if fits else -1)
        assert last + 1 == count or last + 1 in reports
        assert len(asked) == len(set(asked)) <= 40

        def exceeds(more: int, number: int, report: Any) -> bool:
            """Half of what it grows is known."""
            return (heights[shape](more) - heights[shape](number)) / 2 > report.headroom_bytes

        known = {number: predicted(number) for number in draw.sample(range(count), min(count, draw.randrange(3)))}
        asked.clear()
        again, reports = last_that_fits(count, predicted, draw.randrange(count), known=known, exceeds=exceeds)
        assert not {*known} & {*asked}
        assert again == last
        assert last + 1 in (count, *reports) or exceeds(last + 1, last, reports[last])
        fitting = [number for number in asked if number <= last]
        pairs = [(more, number) for number in fitting for more in asked[asked.index(number) :] if more > number]
        assert not [pair for pair in pairs if exceeds(*pair, reports[pair[1]])]


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor()


def config(model: Path, gpu: str, **sections: Any) -> RunConfig:
    raw = {
        "model": {"path": str(model)},
        "adapt": {"router": "all", "experts": {"layers": "1", "ids": [2]}},
        "train": {"sequence_length": 64, "accumulate": 1},
        "hardware": {"gpu": gpu},
    }
    return RunConfig.model_validate(raw | sections)


def test_micro_batch(small_model: Path, predictor: Predictor) -> None:
    run, shown = config(small_model, "560MiB"), []
    solved = solve(run, "train.micro_batch", predictor, show=lambda *one: shown.append(one))
    assert solved.report is not None
    names = [name for name, report in shown if report is None]
    assert [name for name, report in shown if report is not None] == names
    assert {str(solved.value), str(solved.next_value)} <= {*names}
    assert solved.next_report is not None
    assert solved.value > 1
    assert solved.next_value == solved.value + 1
    for value, surely in ((solved.value, True), (solved.next_value, False)):
        train = run.train.model_copy(update={"micro_batch": value})
        assert (predict(run.model_copy(update={"train": train}), advise=False).verdict == "yes") is surely
    assert solved.settings == (f"train.micro_batch={solved.value}",)
    assert solved.to_json()["at"]["method"] == "trace"


def test_layers_of_experts_begin_with_those_that_are_named(small_model: Path, predictor: Predictor) -> None:
    solved = solve(config(small_model, "44GiB"), "adapt.experts.layers", predictor)
    assert (solved.value, solved.next_value, solved.next_report) == ((0, 1), None, None)
    assert solved.settings == ("adapt.experts.layers=0-1",)
    axis = axis_of(resolve(config(small_model, "44GiB"), "cuda"), "adapt.experts.layers")
    assert list(axis.values) == [(1,), (0, 1)]
    axis = axis_of(resolve(config(small_model, "44GiB"), "cuda"), "adapt.experts.ids")
    assert list(axis.values) == [(2,), (0, 2), (0, 1, 2), (0, 1, 2, 3)]


def test_nothing_fits(small_model: Path, predictor: Predictor) -> None:
    solved = solve(config(small_model, "415MiB"), "train.micro_batch", predictor)
    assert (solved.value, solved.report, solved.next_value) == (None, None, 1)
    assert solved.next_report is not None
    assert solved.next_report.fits is False
    assert solved.to_json()["fits"] is False


def test_what_cannot_be_solved_for_is_refused_by_name(small_model: Path, predictor: Predictor) -> None:
    with pytest.raises(UserError, match=r"train\.microbatch.*Did you mean 'train\.micro_batch'"):
        solve(config(small_model, "44GiB"), "train.microbatch", predictor)
    with pytest.raises(UserError, match=r"has no adapt\.lora"):
        solve(config(small_model, "44GiB"), "adapt.lora.rank", predictor)
    with pytest.raises(UserError, match="needs a card"):
        solve(config(small_model, "44GiB", hardware={}), "train.micro_batch", predictor)


HYBRID = ("nemotron", "qwen3-next", "qwen3.5", "qwen3.6")
"""Without a closed form, each try is a trace of minutes."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in recipes() if not name.startswith(("tiny", *HYBRID))])
def test_the_most_rows_of_a_recipe(name: str) -> None:
    config = load_run_config(ROOT / "configs" / f"{name}.yaml")
    solved = solve(config, "train.micro_batch", Predictor())
    assert solved.report is not None
    assert solved.value >= config.train.micro_batch
    assert (solved.report.method, solved.report.verdict) == ("trace", "yes")
    assert solved.next_report is not None
    assert solved.next_report.verdict != "yes"
