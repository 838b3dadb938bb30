"""Training by DeepSpeed against one process: losses, gradient norms and weights at every stage; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel import layouts, world
from tests.parallel.layouts import CASES
from tests.parallel.steps import assert_same

pytest.importorskip("deepspeed")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A user's JSON, under which stage 3 shares even what is small."""
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": "auto", "stage3_param_persistence_threshold": 0}}))
    return file


@pytest.mark.parametrize(
    ("zero", "offload"), [(1, "none"), (2, "none"), (3, "none"), (2, "optimizer")], ids=["1", "2", "3", "2 offload"]
)
def test_a_stage(zero: int, offload: str, alone: list[layouts.Outcome], small_model: Path, sharded: Path) -> None:
    parallel = {"engine": "deepspeed", "fsdp": 2, "zero": zero, "offload": offload, "deepspeed": str(sharded)}
    found = world.run(2, layouts.every_case, parallel, small_model)
    for number, case in enumerate(CASES):
        for rank in range(2):
            one = found[rank][number]
            if zero == 3 and case[1] == "nf4":
                assert "DeepSpeed cannot share packed experts and linears; set parallel.zero: 2" in one.refused
                continue
            assert one.refused == ""
            assert_same(one.taken, alone[number].taken, f"zero {zero}, {case}, rank {rank}")
