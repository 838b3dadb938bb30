"""The kernels' PTX for each compute capability gives what torch's operations give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moetune.experts.kernels import operators, triton_kernels
from moetune.experts.kernels.self_check import TOLERANCE, differing
from tests.ptx import cases
from tests.ptx.cases import Call, Draw
from tests.ptx.driver import emulated

CAPABILITIES = [86, 90, *(pytest.param(one, marks=pytest.mark.full) for one in (80, 89, 100, 120))]
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(20, 60))]
SCRATCH = {"add_rows_": 1}
"""Operator -> the argument whose values mean nothing afterwards."""


def differences(call: Call) -> list[float]:
    """Return the largest difference of each tensor that a kernel has written, relative to its largest value."""
    runs = getattr(triton_kernels, call[0]), operators.REFERENCES[call[0]]
    found, expected = (results(run, *call) for run in runs)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    both = [(one.double(), other.double()) for one, other in zip(found, expected, strict=True) if one.numel()]
    return [float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)) for one, other in both]


def results(run: Any, name: str, args: list[Any]) -> list[Tensor]:
    """Return an operator's result and its tensor arguments afterwards, but for those that mean nothing."""
    given = [placed_alike(arg) if torch.is_tensor(arg) else arg for arg in args]
    result = run(*given)
    given = [arg for place, arg in enumerate(given) if place != SCRATCH.get(name)]
    return [one for one in (result, *given) if torch.is_tensor(one)]


def placed_alike(tensor: Tensor) -> Tensor:
    """Return a copy at an address that is as aligned as that of the tensor, in the same layout."""
    first = tensor.data_ptr() % 64 // tensor.itemsize
    size = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return (
        tensor.new_zeros(size if tensor.numel() else 0).as_strided(tensor.shape, tensor.stride(), first).copy_(tensor)
    )


def assert_agrees(call: Call) -> None:
    dtype = call[1][-1] if call[0].startswith("dequantize") else call[1][0].dtype
    tolerance = 0.0 if call[0].startswith("dequantize") else TOLERANCE[dtype]
    found = differences(call)
    assert found
    assert all(one <= tolerance for one in found), found


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_self_check_passes(capability: int) -> None:
    with emulated(capability) as driver:
        assert differing(triton_kernels, torch.device("cpu"), torch.bfloat16) == []
    assert len(driver.launched) > 15


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_call_agrees(seed: int, capability: int) -> None:
    with torch.no_grad(), emulated(capability):
        assert_agrees(cases.case(seed))


@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("experts", "parts", "rank", "hidden", "intermediate", "gate"),
    [
        pytest.param(1, 1, 16, 4096, 14336, (False, 1.0, 0.0), id="mixtral"),
        pytest.param(8, 2, 16, 2048, 768, (False, 1.0, 0.0), id="qwen3"),
        pytest.param(4, 1, 8, 2880, 2880, (True, 1.702, 7.0), id="gpt-oss"),
        pytest.param(4, 1, 64, 2048, 1024, (False, 1.0, 0.0), id="olmoe"),
    ],
)
def test_real_widths_agree(
    capability: int,
    experts: int,
    parts: int,
    rank: int,
    hidden: int,
    intermediate: int,
    gate: tuple[bool, float, float],
) -> None:
    draw = Draw(0, torch.bfloat16)
    projections = (parts, hidden, 2 * intermediate // parts), (1, intermediate, hidden)
    calls = [
        *(
            cases.low_rank(draw, name, 70, experts, rank, *projection)
            for name in ("low_rank", "low_rank", "low_rank", "low_rank_gradients_")
            for projection in projections
        ),
        *(cases.gated(draw, name, 9, intermediate, gate) for name in ("gated", "gated_backward_")),
        *(cases.rows(draw, name, 9, hidden, 4) for name in ("gather_rows", "sum_rows_", "add_rows_")),
        cases.nf4(draw, experts, (16, hidden), double_quant=True),
    ]
    with torch.no_grad(), emulated(capability):
        for call in calls:
            assert_agrees(call)
