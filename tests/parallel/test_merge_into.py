"""`train.merge_into` over several ranks: replicas and stages compute what one rank does; sharding is refused."""

from pathlib import Path
from typing import Any

import pytest

from moetune.errors import UserError
from moetune.run.resolve import resolve
from tests import small
from tests.parallel import layouts, pipelines

CASE = ("lora", "fp32")
FP32 = {"base": "fp32", "dtype": "fp32"}
MERGE = {"merge_into": "nvfp4"}


@pytest.mark.full
@pytest.mark.parametrize("parallel", [{"replicate": 2}, {"pp": 2}])
def test_replicas_and_stages(parallel: dict[str, Any], small_model: Path, small_data: Path, tmp_path: Path) -> None:
    runs = {"plain": ({}, {}), "alone": ({}, {"train": MERGE}), "two": (parallel, {"train": MERGE})}
    for name, (ranks, train) in runs.items():
        config = pipelines.config_of(small_model, small_data, tmp_path / name, "lora", ranks, 3, **train)
        pipelines.run(config.but(model=FP32))
    plain, alone, two = (
        [line["loss"] for line in small.read_metrics(tmp_path / name) if "loss" in line] for name in runs
    )
    assert two == pytest.approx(alone, rel=1e-5)
    assert plain != pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("name", ["fsdp 2", "ep 2", "tp 2 × ep 2", "deepspeed, zero 1"])
def test_whoever_shards_is_refused(name: str, small_model: Path) -> None:
    config = layouts.config_of((layouts.LAYOUTS | layouts.DEEPSPEED)[name], CASE, small_model)
    with pytest.raises(UserError, match=r"train\.merge_into: nvfp4: it needs whole weights .*shards them"):
        resolve(config.but(train=MERGE), "cpu")
