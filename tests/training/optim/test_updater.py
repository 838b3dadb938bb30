"""Weights of 16 bits: small updates that are lost, kept in a float32 copy, or kept on average."""

from typing import Any

import pytest
import torch
from torch import nn

from moetune.training.optim.updater import Updater, round_stochastically_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("masters", "moves"), [("none", 0.0), ("fp32", 0.1), ("stochastic", 0.1)])
def test_a_hundred_updates_of_a_thousandth(masters: Any, moves: float, dtype: torch.dtype, device: str) -> None:
    """2^-10 of a weight of 1 + 2^-10: half the distance to the next float16 and an eighth of that to the next
    bfloat16, so that each by itself rounds to nothing."""
    torch.manual_seed(0)
    small = 2.0**-10 if dtype == torch.bfloat16 else 2.0**-12
    weight = nn.Parameter(torch.ones(10_000, dtype=dtype, device=device))
    updater = Updater([weight], sgd, masters)
    for _ in range(100):
        weight.grad = torch.full_like(weight, -small)
        updater.step()
    mean = weight.detach().double().mean().item() - 1
    expected = 100 * small if moves else 0.0
    # one rounding of the copy; or the mean of 10,000 random walks
    assert mean == pytest.approx(expected, abs=2**-8 if masters == "fp32" and dtype == torch.bfloat16 else 2**-10)
    assert (mean == 0.0) == (masters == "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_right_on_average_and_never_beyond_the_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.tensor([1.001, -3.3333, 0.0123, -1e-3])
    rounded = torch.empty(4, 40_000, dtype=dtype)
    round_stochastically_(rounded, values[:, None].expand(4, 40_000).contiguous())
    torch.testing.assert_close(rounded.double().mean(1), values.double(), rtol=1e-4, atol=0)
    for row, value in zip(rounded, values, strict=True):
        below, above = sorted(set(row.tolist()))
        assert below < value < above
        assert torch.nextafter(torch.tensor(below, dtype=dtype), torch.tensor(torch.inf, dtype=dtype)) == above


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_can_be_represented_is_not_rounded(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 0.15625, torch.inf, -torch.inf])
    rounded = torch.empty(7, dtype=dtype)
    round_stochastically_(rounded, values)
    assert torch.equal(rounded.float(), values)


def test_a_float32_weight_needs_no_copy() -> None:
    weight = nn.Parameter(torch.ones(4))
    for masters in ("fp32", "stochastic"):
        assert not Updater([weight], sgd, masters).copies  # type: ignore[arg-type]


def test_a_copy_is_saved_with_the_state() -> None:
    """Two updates in a row, and with a checkpoint between them: the copy's lower bits must survive."""
    finals = []
    for interrupted in (False, True):
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        updater = Updater([weight], sgd, "fp32")
        for number in range(12):
            weight.grad = torch.full_like(weight, 2.0**-10)
            updater.step()
            if interrupted and number == 5:
                ((_, _, states),) = updater.saved()
                weight = nn.Parameter(weight.detach().clone())
                updater = Updater([weight], sgd, "fp32")
                updater.restore({weight: states})
        finals.append(weight.detach().clone())
    assert torch.equal(*finals)
    assert finals[0][0] < 1
