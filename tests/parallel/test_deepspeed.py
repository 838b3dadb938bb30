"""Training by DeepSpeed against one process: what is not finite, what a trace leaves, and what is not predicted."""

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from moetune.config.schema import HardwareConfig, ParallelConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.trace import trace
from moetune.parallel.ranks import Ranks
from moetune.planning.predict import predict
from moetune.run.validation import untrainable_settings
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.step.stepper import Stepper
from tests import small
from tests.parallel import steps, world
from tests.resolved import build, train
from tests.run.test_deepspeed_json import run_config

with_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def one_rank_breaks(config: RunConfig) -> list[float | str]:
    """What each of three steps gives: its norm or error, and by how much weights moved. The second has a loss that is
    not a number, on one rank."""
    ranks = Ranks.join(config.parallel, "cpu")
    adapted = build(config, "cpu", ranks=ranks)
    optimizer = make_optimizer(adapted)
    stepper = Stepper(adapted, optimizer)
    given: list[float | str] = []
    for step in range(3):
        total = float("nan") if (step, ranks.rank) == (1, 1) else 100.0
        stepper.micro_step(steps.batch_of(config, 2 * step + ranks.rank), torch.tensor(total))
        before = steps.whole_weights(adapted, optimizer)
        try:
            given.append(float(stepper.finish().norm))
        except UserError as error:
            return [*given, str(error)]
        after = steps.whole_weights(adapted, optimizer)
        given.append(max(float((after[name] - before[name]).abs().max()) for name in before))
    return given


@pytest.mark.one_in(2)
@with_deepspeed
@pytest.mark.parametrize(("zero", "on_nonfinite"), [(2, "stop"), (3, "skip")])
def test_what_is_not_finite_touches_no_weight(zero: int, on_nonfinite: str, small_model: Path) -> None:
    config = run_config({"zero": zero}, model={"path": str(small_model)}, train={"on_nonfinite": on_nonfinite})
    for given in world.run(2, one_rank_breaks, config):
        assert given[1] > 0
        if on_nonfinite == "stop":
            assert str(given[2]).startswith("the gradient of model.layers.1.mlp.experts.trained.2.")
            assert "No weight was updated with it" in str(given[2])
        else:
            assert given[2:4] == [float("inf"), 0.0]
            assert given[5] > 0


def test_without_the_package(configure: small.Configure, monkeypatch: Any) -> None:
    monkeypatch.setattr("moetune.parallel.deepspeed.find_spec", lambda name: None)
    run = configure(parallel={"engine": "deepspeed", "fsdp": 2, "zero": 2}, hardware={"count": 2})  # fmt: skip
    predicted = run_config({"zero": 2}, model={"path": "tiny-mixtral"}, adapt={"router": "all"})
    for command in (partial(train, run, dry_run=True), partial(predict, predicted)):
        with pytest.raises(UserError, match=r"needs a package that is not installed: .* pip install .* deepspeed"):
            command()


@pytest.mark.full
@with_deepspeed
def test_nothing_of_a_trace_stays_in_the_process(small_model: Path) -> None:
    def of_process() -> tuple[Any, ...]:
        return functional.linear, sys.excepthook, dict(os.environ), torch.distributed.is_initialized()

    config = run_config({"zero": 3}, model={"path": str(small_model)}, adapt={"router": "all"})
    alone = config.model_copy(update={"parallel": ParallelConfig(), "hardware": HardwareConfig()})
    before, first = of_process(), trace(alone)
    other = config.model_copy(update={"parallel": ParallelConfig(engine="deepspeed", fsdp=3)})
    assert [len(trace(one).collectives) > 0 for one in (config, other)] == [True, True]
    assert of_process() == before
    assert trace(alone).log == first.log


def test_offloading_is_trained_and_not_predicted() -> None:
    config = run_config({"zero": 2, "offload": "optimizer"}, model={"path": "tiny-mixtral"}, adapt={"router": "all"})
    assert not list(untrainable_settings(config))
    with pytest.raises(UserError, match=r"parallel\.offload: optimizer can be trained, not predicted or verified"):
        predict(config)
    with pytest.raises(UserError, match=r"parallel\.offload: optimizer goes with engine: deepspeed"):
        predict(run_config({"engine": "fsdp2", "offload": "optimizer"}, model={"path": "tiny-mixtral"}))
