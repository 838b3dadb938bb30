"""What a process takes outside torch's allocator."""

from typing import Any

import pytest

from moetune.config.schema import ParallelConfig
from moetune.memory.rank_memory import CONNECTION, communicators, outside_allocator
from moetune.models.catalog.gpus import find_gpu


@pytest.mark.parametrize(
    ("parallel", "connections"),
    [
        ({}, 0),
        ({"fsdp": 2}, 1),  # all ranks, which is also the axis
        ({"fsdp": 2, "ep": 2}, 1 + 1),  # and tokens to the other one
        ({"fsdp": 8, "ep": 8}, 1 + 7),
        ({"replicate": 2, "fsdp": 2}, 3),  # all, and either axis; whoever sees other data is all
        ({"tp": 2, "fsdp": 2}, 3),
        ({"tp": 2, "fsdp": 2, "ep": 4}, 3 + 3),
        (
            {"replicate": 2, "fsdp": 2, "ep": 2},
            3 + 1,
        ),  # ep: one replica; copies: across them
    ],
)
def test_each_set_of_ranks_has_a_ring_and_experts_have_a_connection_to_each(
    parallel: dict[str, Any], connections: int
) -> None:
    assert communicators(ParallelConfig.model_validate(parallel), channels=2) == connections * 2 * CONNECTION


def test_nvlink_has_more_channels() -> None:
    two = ParallelConfig(fsdp=2)
    for name, channels in (("l40s", 2), ("h100-80gb", 32)):
        card = find_gpu(name)
        assert outside_allocator(two, card) - card.context.value == channels * CONNECTION
