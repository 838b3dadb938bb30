"""What was predicted is compared with the routing that happened, so that a right prediction holds."""

from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import BALANCED
from tests import small
from tests.resolved import verify

SHARED = {"dtype": "bf16", "share": "outer"}


@pytest.fixture
def config(small_data: Path, tmp_path: Path) -> RunConfig:
    """A small run with LoRA whose peak is of the expert that receives most. All batches are full."""
    model = small.write_model(tmp_path / "model", intermediate_size=512)
    settings = {
        "sequence_length": 64, "micro_batch": 3, "accumulate": 1, "steps": 2, "loss_memory": "1MiB", "expert_memory": 0
    }  # fmt: skip
    adapt = {"lora": {"rank": 4, "alpha": 8, "targets": ["experts"]}}
    return small.run_config(model, small_data, tmp_path / "run", adapt=adapt, train=settings, data={"packing": True})


@pytest.mark.full
def test_factors_in_bf16_and_shared_ones_are_predicted_to_the_byte(
    config: RunConfig, pytestconfig: pytest.Config
) -> None:
    """On a push the first and the last of these ways, of which each takes less."""
    lora = {"rank": 8, "alpha": 8, "targets": ["attention", "experts"]}
    peaks = []
    fused = {"name": "adamw8bit", "fused_backward": True}
    ways: Any = ({}, {}), ({"dtype": "bf16"}, {}), ({"dtype": "bf16"}, fused), (SHARED, fused)
    for more, optimizer in ways if pytestconfig.getoption("--all") else ways[::3]:
        own = {"adapt": {"lora": lora | more}, "train": config.train.model_dump() | {"max_grad_norm": 0}}
        run = RunConfig.model_validate(config.model_dump() | own | ({"optimizer": optimizer} if optimizer else {}))
        outcome = verify(run, 2)
        assert outcome.predicted["peak_allocated"] == outcome.measured["peak_allocated"], more
        peaks.append(outcome.measured["peak_allocated"])
    assert peaks == sorted(peaks, reverse=True)
    assert len({*peaks}) == len(peaks)


def test_verify_replays_every_call(config: RunConfig) -> None:
    outcome = verify(config, 2)
    assert (outcome.routing, outcome.holds) == ("measured", True)
    assert outcome.predicted["peak_allocated"] == outcome.measured["peak_allocated"]
    even = verify(config, 2, BALANCED)
    assert even.predicted["peak_allocated"] != even.measured["peak_allocated"]
    with pytest.raises(UserError, match="0 steps: give 1 or more"):
        verify(config, 0)
