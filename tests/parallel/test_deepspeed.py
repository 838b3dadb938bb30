"""Training by DeepSpeed against one process: losses, gradient norms and weights at every stage; what it refuses."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from moetune.config.schema import HardwareConfig, ParallelConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.predict import Method, NoClosedForm, predict
from moetune.memory.trace import trace
from moetune.parallel.ranks import Ranks
from moetune.run.deepspeed_json import deepspeed_json
from moetune.run.validation import untrainable_settings
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.step.stepper import Stepper
from tests import small
from tests.parallel import steps, world
from tests.resolved import build, train

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


def run_config(parallel: dict[str, Any], /, **sections: Any) -> RunConfig:
    """Two ranks train some experts in float32."""
    parallel = {"engine": "deepspeed", "fsdp": 2} | parallel
    size = parallel["fsdp"] * parallel.get("replicate", 1) * parallel.get("tp", 1)
    model = {"base": "fp32", "dtype": "fp32"} | sections.pop("model", {})
    return small.run_config(
        Path("no-model"), Path("no-data"), Path("no-output"), "experts",
        parallel=parallel, hardware={"count": size}, model=model, **sections,
    )  # fmt: skip


def test_the_generated_json() -> None:
    config = run_config({"fsdp": 4, "zero": 2, "offload": "optimizer"}, train={"max_grad_norm": 0.0})
    assert deepspeed_json(config, trained=1000) == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000},
        "bf16": {"enabled": False, "check_grad_overflow": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    large = run_config({}, model={"dtype": "bf16", "base": "bf16"}, optimizer={"master_weights": "fp32"})
    found = deepspeed_json(large, trained=10**10)
    assert found["gradient_clipping"] == 1.0
    assert found["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "none"}, "reduce_bucket_size": 2**26,
    }  # fmt: skip
    assert found["bf16"]["enabled"]


def test_a_users_json_is_merged(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps(
            {
                "gradient_clipping": "auto",
                "gradient_accumulation_steps": 2,
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 5, "offload_optimizer": {"pin_memory": True}},
                "wall_clock_breakdown": True,
            }
        )
    )
    found = deepspeed_json(run_config({"zero": 2, "deepspeed": str(file)}), trained=1000)
    assert found["gradient_clipping"] == 1.0
    assert found["wall_clock_breakdown"] is True
    assert found["zero_optimization"] == {
        "stage": 2, "reduce_bucket_size": 5, "offload_optimizer": {"pin_memory": True, "device": "none"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"gradient_clipping": 5}', "gradient_clipping: 5, and the run file makes it 1.0"),
        ('{"zero_optimization": {"stage": 1}}', "zero_optimization.stage: 1, and the run file makes it 2"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', 'makes it "none"'),
        ('{"zero_optimization": 2}', "zero_optimization: 2, and the run file makes it {"),
        ('{"optimizer": {"type": "Adam"}}', "optimizer: leave it out; optimizer: of the run file says it"),
        ('{"zero_optimization": {"offload_param": {}}}', "zero_optimization.offload_param: leave it out"),
        ("[1]", "[1]: Input should be an object"),
        ("{", "cannot be read: Invalid JSON"),
    ],
)
def test_a_users_json_that_says_otherwise(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(problem)):
        deepspeed_json(run_config({"zero": 2, "deepspeed": str(file)}))


def test_a_json_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"'nowhere.json' cannot be read: No such file"):
        deepspeed_json(run_config({"deepspeed": "nowhere.json"}))
    with pytest.raises(ValueError, match="set engine: deepspeed, or leave it out"):
        run_config({"engine": "fsdp2", "deepspeed": "nowhere.json"})


@pytest.mark.parametrize(
    ("parallel", "sections", "problem"),
    [
        ({"replicate": 2}, {}, "parallel.replicate 2: "),
        ({"ep": 2}, {}, "parallel.ep 2: DeepSpeed shares over parallel.fsdp alone; set ep: 1, or use engine: fsdp2"),
        ({"tp": 2}, {}, "parallel.tp 2: "),
        ({"fsdp": 1}, {}, "parallel.fsdp 1: there is nothing to share"),
        ({"reshard": False}, {}, "parallel.reshard: false is FSDP2's; set parallel.zero: 2"),
        ({}, {"model": {"base": "nf4"}}, "DeepSpeed cannot share packed experts and linears; set parallel.zero: 2"),
        ({}, {"model": {"experts_on": "host"}}, "model.experts_on: host"),
        ({}, {"model": {"dtype": "fp16"}}, "use bf16 or fp32"),
        ({}, {"model": {"dtype": "bf16"}}, "set master_weights: fp32"),
        (
            {}, {"model": {"dtype": "bf16"}, "adapt": small.ADAPT["lora"], "optimizer": {"master_weights": "fp32"}},
            "DeepSpeed wants one dtype of all that trains",
        ),
        ({}, {"train": {"max_grad_value": 1.0}}, "use train.max_grad_norm"),
        ({}, {"optimizer": {"name": "adamw8bit"}}, "optimizer.name adamw8bit"),
        ({}, {"optimizer": {"name": "lomo"}, "train": {"accumulate": 1}}, "optimizer.fused_backward"),
        ({}, {"optimizer": {"offload": True}}, "set parallel.offload: optimizer instead"),
        ({}, {"optimizer": {"master_weights": "stochastic"}}, "set none or fp32"),
        (
            {}, {"optimizer": {"router": {"name": "sgd"}, "experts": {"name": "adamw"}}},
            "DeepSpeed has one optimizer for all",
        ),
    ],
)  # fmt: skip
def test_what_it_cannot_do(parallel: dict[str, Any], sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)) as refused:
        deepspeed_json(run_config(parallel, **sections))
    assert str(refused.value).startswith("parallel.engine: deepspeed and ")


def test_without_the_package(small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("moetune.parallel.deepspeed.find_spec", lambda name: None)
    run = small.run_config(
        small_model, small_data, tmp_path / "run", parallel={"engine": "deepspeed", "fsdp": 2, "zero": 2},
        hardware={"count": 2},
    )  # fmt: skip
    with pytest.raises(UserError, match=r"needs a package that is not installed: .* pip install .* deepspeed"):
        train(run, dry_run=True)


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


def test_without_the_package_it_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config({"zero": 2}, model={"path": "tiny-mixtral"}, adapt={"router": "all"})
    monkeypatch.setattr("moetune.parallel.deepspeed.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs a package that is not installed"):
        predict(config)
    with pytest.raises(NoClosedForm, match="DeepSpeed"):
        predict(config, method="formula")


@pytest.mark.parametrize("method", ["trace", "formula"])
def test_offloading_is_trained_and_not_predicted(method: Method) -> None:
    config = run_config({"zero": 2, "offload": "optimizer"}, model={"path": "tiny-mixtral"}, adapt={"router": "all"})
    assert not list(untrainable_settings(config))
    with pytest.raises(UserError, match=r"parallel\.offload: optimizer can be trained, not predicted or verified"):
        predict(config, method=method)
    with pytest.raises(UserError, match=r"parallel\.offload: optimizer goes with engine: deepspeed"):
        predict(run_config({"engine": "fsdp2", "offload": "optimizer"}, model={"path": "tiny-mixtral"}), method=method)
