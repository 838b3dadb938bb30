"""What numbers say about the order of experts, and when they say nothing."""

import pytest
import torch
from torch import Tensor

from moetune.adapters.evidence import sign_of
from moetune.adapters.stacked import ORDERS

EXPERTS, RANK = 16, 4


def stacks(layout: str, sizes: Tensor, *, zero: tuple[int, ...] = (), pad: int = 0) -> list[tuple[Tensor, Tensor, int]]:
    """Two layers whose experts' B have these sizes; some are zero, and the last `pad` ranks of all."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        A = torch.randn(EXPERTS, RANK, 8, generator=generator)
        B = torch.randn(EXPERTS, 32, RANK, generator=generator) * sizes[:, None, None]
        B[list(zero)] = 0
        if pad:
            A[:, -pad:], B[:, :, -pad:] = 0, 0
        found.append((*ORDERS[layout].write(A, B), EXPERTS))
    return found


LAYOUTS = [("peft", "interleaved"), ("unsloth-grouped", "grouped")]
EQUAL, UNEQUAL = torch.ones(EXPERTS), torch.linspace(0.5, 2, EXPERTS)


@pytest.mark.parametrize(("layout", "verdict"), LAYOUTS)
def test_zero_experts_and_unequal_ones_tell_the_order(layout: str, verdict: str) -> None:
    for told in (stacks(layout, EQUAL, zero=(3, 9)), stacks(layout, UNEQUAL), stacks(layout, EQUAL, zero=(3,), pad=2)):
        sign = sign_of(told)
        assert sign is not None
        assert sign.verdict == verdict


@pytest.mark.parametrize(("layout", "verdict"), LAYOUTS)
def test_equal_experts_padded_ranks_and_no_training_tell_nothing(layout: str, verdict: str) -> None:
    for silent in (stacks(layout, EQUAL), stacks(layout, EQUAL, pad=2), stacks(layout, 0 * EQUAL)):
        assert sign_of(silent) is None
