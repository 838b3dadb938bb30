"""The settings that DeepSpeed gets, and what it is refused for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.run.deepspeed_json import deepspeed_json
from tests import small


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
    file, zero = (
        tmp_path / "mine.json",
        {"stage": 2, "reduce_bucket_size": 5, "offload_optimizer": {"pin_memory": True}},
    )
    mine = {"gradient_clipping": "auto", "gradient_accumulation_steps": 2, "wall_clock_breakdown": True}
    file.write_text(json.dumps(mine | {"zero_optimization": zero}))
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
        ('{"optimizer": {"type": "Adam"}}', "optimizer: leave it out; the run file"),
        ('{"zero_optimization": {"offload_param": {}}}', "zero_optimization.offload_param: leave it out"),
        ('{"zero_optimization": {"reduce_bucket_size": "large"}}', 'reduce_bucket_size: "large"; give a number'),
        ('{"zero_optimization": {"reduce_bucket_size": [5]}}', "reduce_bucket_size: [5]; give a number"),
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
        ({}, {"model": {"base": "nf4"}}, "DeepSpeed cannot shard quantized experts and linears; set parallel.zero: 2"),
        ({}, {"model": {"experts_on": "host"}}, "model.experts_on: host"),
        ({}, {"model": {"dtype": "fp16"}}, "use bf16 or fp32"),
        ({}, {"model": {"dtype": "bf16"}}, "set master_weights: fp32"),
        (
            {}, {"model": {"dtype": "bf16"}, "adapt": small.ADAPT["lora"], "optimizer": {"master_weights": "fp32"}},
            "DeepSpeed wants one dtype of all that trains",
        ),
        (
            {}, {"adapt": {"lora": small.ADAPT["lora"]["lora"] | {"dtype": "bf16"}}},
            "adapt.lora.dtype: bf16: not tried with DeepSpeed; set fp32",
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
