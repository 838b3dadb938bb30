"""The largest value that fits: with it the run fits by trace, and one notch further it does not."""

from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.planning.predict import predict
from moetune.planning.predictor import Predictor
from moetune.planning.solve import axis_of, solve
from moetune.run.resolve import resolve


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
    assert {str(solved.value), str(solved.next_value)} <= {name for name, _ in shown}
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
