"""The operators of an expert bank in torch's operations, which the kernels are compared with (tests/ptx)."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from moetune.adapt.guard.comparison import differences, is_alike
from moetune.kernels import operators as kernels
from moetune.kernels.registry import OPERATORS
from tests.kernels.recorded import calls


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


GATES = [(False, 1.0, 0.0), (True, 1.0, 0.0), (True, 1.702, 1.5), (False, 1.702, 1.5)]


@pytest.mark.parametrize("gate", GATES)
def test_the_way_back_through_a_gate_is_that_of_autograd(gate: tuple[bool, float, float]) -> None:
    gate_up, dact = random(5, 48).double().requires_grad_(), random(5, 24, seed=1).double()
    order, weights, dweights = torch.arange(5), random(5, seed=2).double(), torch.zeros(5).double()
    halves = (gate_up[:, ::2], gate_up[:, 1::2]) if gate[0] else gate_up.chunk(2, 1)
    if gate[2]:
        glu = halves[0].clamp(max=gate[2])
        act = glu * torch.sigmoid(gate[1] * glu) * (halves[1].clamp(-gate[2], gate[2]) + 1)
    else:
        act = torch.nn.functional.silu(halves[0]) * halves[1]
    (expected,) = torch.autograd.grad(act, gate_up, dact * weights[:, None])
    found, found_act = gate_up.detach().clone(), dact.clone()
    kernels.gated_backward_(found, found_act, weights, order, dweights, *gate)
    torch.testing.assert_close([found, found_act, dweights], [expected, act.detach(), (dact * act.detach()).sum(1)])


def test_rows_are_gathered_and_summed() -> None:
    order, x, weights = (
        torch.randperm(27, generator=torch.Generator().manual_seed(0)),
        random(9, 40),
        random(27, seed=1),
    )
    inverse, total = torch.zeros(27, dtype=torch.int32), torch.zeros_like(x)
    rows = kernels.gather_rows(x, order, 3, inverse)
    assert torch.equal(rows, x[order // 3])
    kernels.sum_rows_(total, rows, inverse, weights)
    expected = x * weights.view(9, 3).sum(1, keepdim=True)
    torch.testing.assert_close(total, expected)
    added = torch.zeros_like(x)
    for choice in range(3):
        of_choice = order % 3 == choice
        kernels.add_rows_(added, rows[of_choice], order[of_choice], 3, weights)
    torch.testing.assert_close(added, expected)


def test_low_rank_products_are_those_of_each_row() -> None:
    """In two parts, of three experts, one of them without rows; float64 against loops."""
    counts, ends = [4, 0, 5], torch.tensor([4, 4, 9], dtype=torch.int32)
    A, B = random(3, 2, 4, 6).double(), random(3, 2, 5, 4, seed=1).double()
    x, base = random(9, 6, seed=2).double(), random(9, 2, 5, seed=3).double()
    expert = [0] * 4 + [2] * 5
    out = torch.zeros_like(base)
    narrow = kernels.low_rank(x, A, B, base, out, ends, counts, 0.5)
    expected = torch.stack([A[e] @ row for e, row in zip(expert, x, strict=True)])
    torch.testing.assert_close(narrow, expected)
    update = torch.stack([(B[e] @ few[..., None])[..., 0] for e, few in zip(expert, expected, strict=True)])
    torch.testing.assert_close(out, base + 0.5 * update)
    dx = torch.zeros_like(x)
    kernels.low_rank(base, B.mT, A.mT, torch.zeros_like(x), dx, ends, counts, 1.0)
    for e, row, found in zip(expert, base, dx, strict=True):
        torch.testing.assert_close(found, sum(A[e, part].T @ (B[e, part].T @ row[part]) for part in (0, 1)))


def test_the_sum_with_low_rank_terms_is_that_of_each_row() -> None:
    """In two parts whose columns alternate, in float64."""
    counts, ends = [2, 0, 3], torch.tensor([2, 2, 5], dtype=torch.int32)
    x, W, narrow = (random(*size).double() for size in ((5, 6), (3, 8, 6), (5, 2, 3)))
    second, out = random(3, 2, 4, 3, seed=1).double(), torch.empty(5, 8).double()
    kernels.low_rank_product_(out, x, W.mT, narrow, second, ends, counts, 0.5, True)
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        terms = torch.stack([second[expert, part] @ narrow[row, part] for part in (0, 1)], 1).flatten()
        torch.testing.assert_close(out[row], W[expert] @ x[row] + 0.5 * terms)


def test_a_kernel_that_is_wrong_is_found_and_no_other() -> None:
    wrong = {"gated": lambda *args: OPERATORS["gated"].reference(*args) * 1.01, "sum_rows_": lambda out, *_: _lose(out)}
    found = {}
    with torch.no_grad():
        for name, args in calls(torch.device("cpu"), torch.float32, 4, hidden=32, intermediate=32, rank=2):
            if not OPERATORS[name].scratch:  # which a kernel may leave as it was, and the reference does not
                off = next(differences(OPERATORS[name], args, wrong.get(name, OPERATORS[name].reference)))
                if not is_alike(off, torch.float32):
                    found[name] = off
    assert found == {"sum_rows_": pytest.approx(torch.nan, nan_ok=True), "gated": pytest.approx(0.01, rel=0.05)}


def _lose(out: Any) -> None:
    out.fill_(torch.nan)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_where_triton_does_not_work_torch_computes_and_it_is_said() -> None:
    with pytest.warns(UserWarning, match="Triton does not work here .* experts run slower, and may take more memory"):
        assert kernels.on_gpu() is None
    with warnings.catch_warnings(action="error"):
        assert kernels.on_gpu() is None  # said once
    kernels.on_gpu.cache_clear()
