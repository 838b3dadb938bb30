"""The kernels of an expert bank: in Triton's interpreter each gives what torch's operations give (tests/ptx executes
what they compile to). Tolerances: 1e-5 relative in float32, 4e-3 in float16, whose torch operations round more
often; what is unpacked is equal bit for bit. The interpreter takes bfloat16 for integers. Not measured on a GPU."""

import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moetune.experts.quantized import QuantizedExperts
from moetune.experts.self_check import differences, is_alike
from moetune.kernels import operators as kernels
from moetune.kernels.registry import OPERATORS
from tests.kernels.interpreter import interpreted_module
from tests.kernels.recorded import calls

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16]


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    module = interpreted_module("triton_kernels")
    module.COLUMNS = 16  # more than one tile
    return module


@pytest.fixture(scope="module")
def low_rank_kernels() -> ModuleType:
    module = interpreted_module("triton_low_rank")
    module.ROWS = 16
    return module


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(interpreted: ModuleType, name: str, *args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernel and what torch's operations return, and have made of their tensors."""
    results = []
    for run in (getattr(interpreted, name), getattr(torch.ops.moetune, name)):
        copies = [arg.clone(memory_format=torch.preserve_format) if torch.is_tensor(arg) else arg for arg in args]
        given = run(*copies)
        results.append(
            [one for one in (*(given if isinstance(given, tuple) else (given,)), *copies) if torch.is_tensor(one)]
        )
    return results[0], results[1]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    rtol = 4e-3 if torch.float16 in {tensor.dtype for tensor in found} else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=rtol * float(other.numel() and other.float().abs().max())
        )


def shuffled(tokens: int, top_k: int, experts: int) -> tuple[Tensor, list[int]]:
    """Flat positions, sorted by a random expert that is never the second, and the experts' rows."""
    ids = torch.stack([torch.randperm(experts - 1, generator=torch.Generator().manual_seed(t)) for t in range(tokens)])
    ids = ids[:, :top_k].flatten()
    ids[ids == 1] = experts - 1
    return torch.argsort(ids, stable=True), torch.bincount(ids, minlength=experts).tolist()


def nvfp4(count: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and fractions; every scale but zero and NaN."""
    wide = -(-columns // 16)
    codes = torch.randint(0, 256, (count, rows, 8 * wide), dtype=torch.uint8)
    scales = torch.arange(count * rows * wide).remainder(126).add(1).to(torch.uint8).view(count, rows, wide)
    return codes, scales, random(count, 2).abs() / 1000


def int4(count: int, rows: int, columns: int, group: int, ordered: bool) -> list[Any]:
    """Codes, scales of which every other matrix has them in float16, zero points, groups of columns."""
    groups = -(-columns // (group or columns))
    codes, zeros = (torch.randint(0, 256, (count, rows, n), dtype=torch.uint8) for n in (4 * -(-columns // 8), groups))
    scales = random(count, rows, groups) / 100
    half = torch.arange(count).remainder(2).to(torch.uint8)
    bits = [scales[n].to(torch.float16 if half[n] else torch.bfloat16).view(torch.int16) for n in range(count)]
    order = torch.randint(0, groups, (count, columns), dtype=torch.int16) if ordered else None
    return [codes, torch.stack(bits), half, zeros[..., : -(-groups // 2)].contiguous(), order, group, columns]


def dequantizations(dtype: torch.dtype) -> Iterator[tuple[str, list[Any]]]:
    """Of NF4, int8, FP8, NVFP4, INT4, whole blocks and not; of MXFP4 every byte, at nine exponents of normal ones."""
    for shape, double_quant in product([(64, 512), (24, 20), (96, 32), (15, 9)], [True, False]):
        nf4 = QuantizedExperts(3, shape, "nf4", double_quant=double_quant)
        for number in range(3):
            nf4.quantize_(number, random(*shape, seed=number))
        nested = (nf4.nested_absmax, nf4.nested_code, nf4.offset) if double_quant else (None, None, None)
        yield "dequantize_nf4", [nf4.data, nf4.absmax, *nested, shape[0] * shape[1], dtype]
    for shape in [(24, 20), (15, 9), (3, 160)]:
        int8 = QuantizedExperts(1, shape, "int8")
        int8.quantize_(0, random(*shape))
        yield "dequantize_int8", [int8.data[0], int8.absmax[0], dtype]
    for shape in [(2, 130, 260), (1, 128, 128), (3, 33, 7)]:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8)
        codes[(codes & 127) == 127] = 0  # NaN is not equal to itself
        yield "dequantize_fp8", [codes, random(shape[0], -(-shape[1] // 128), -(-shape[2] // 128)), 128, 128, dtype]
        yield "dequantize_fp8", [codes, random(shape[0], 1, 1), 0, 0, dtype]
        yield "dequantize_fp8", [codes, random(shape[0], shape[1], 1), 1, 0, dtype]
        powers = torch.randint(117, 127, (*shape[:2], -(-shape[2] // 32)), dtype=torch.uint8)
        yield "dequantize_fp8", [codes, powers, 1, 32, dtype]
    for shape in [(2, 40, 64), (1, 33, 7), (3, 5, 272)]:
        codes, scales, fractions = nvfp4(*shape)
        yield "dequantize_nvfp4", [codes, scales, fractions, shape[2], dtype]
    for shape in [(2, 40, 64, 32), (2, 17, 200, 64), (3, 5, 272, 128), (2, 33, 300, 0)]:
        for ordered in (False, True):
            yield "dequantize_int4", [*int4(*shape, ordered), dtype]
    near = 120 if dtype == torch.float32 else 12
    exponents = torch.arange(127 - near, 128 + near, near // 4, dtype=torch.uint8)
    data, scales = torch.arange(256, dtype=torch.uint8).repeat(len(exponents)), exponents.repeat_interleave(16)
    yield "dequantize_mxfp4", [data, scales, QuantizedExperts(1, (64, 64), "mxfp4").pairs, dtype]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantization_is_exact(interpreted: ModuleType, dtype: torch.dtype) -> None:
    for name, args in dequantizations(dtype):
        found, expected = both(interpreted, name, *args)
        assert torch.equal(found[0], expected[0]), (name, args)


GATES = [(False, 1.0, 0.0), (True, 1.0, 0.0), (True, 1.702, 1.5), (False, 1.702, 1.5)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_gates(interpreted: ModuleType, gate: tuple[bool, float, float], dtype: torch.dtype) -> None:
    assert_alike(*both(interpreted, "gated", random(5, 48, dtype=dtype), *gate))
    order, weights = torch.tensor([7, 0, 3, 1, 9]), random(10, seed=2)
    for dweights in (torch.zeros(10), None):
        rows = random(5, 48, dtype=dtype), random(5, 24, dtype=dtype, seed=1)
        assert_alike(*both(interpreted, "gated_backward_", *rows, weights, order, dweights, *gate))


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_gathered_and_summed(interpreted: ModuleType, dtype: torch.dtype) -> None:
    order, counts = shuffled(9, 3, 5)
    x, weights = random(9, 40, dtype=dtype), random(27, seed=1)
    inverse = torch.zeros(27, dtype=torch.int32)
    assert_alike(*both(interpreted, "gather_rows", x, order, 3, inverse))
    assert_alike(*both(interpreted, "gather_rows", x, order[counts[0] :], 3, None))
    rows = kernels.gather_rows(x, order, 3, inverse)
    for weighted in (weights, None):
        assert_alike(*both(interpreted, "sum_rows_", torch.empty_like(x).zero_(), rows, inverse, weighted))
        (found, *_), (expected, *_) = both(
            interpreted, "add_rows_", x, rows[: counts[0]], order[: counts[0]], 3, weighted
        )
        assert_alike([found], [expected])
    total = torch.zeros_like(x)
    kernels.sum_rows_(total, rows, inverse, weights)
    torch.testing.assert_close(total, x * weights.view(9, 3).sum(1, keepdim=True).to(dtype), rtol=0.05, atol=0.05)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda rows: rows,
    "every second column": lambda rows: rows.repeat_interleave(2, 1)[:, ::2],
    "half of the columns": lambda rows: torch.cat([rows, rows], 1)[:, rows.shape[1] :],
}


ON_A_PUSH = [(1, torch.float32, 3, "half of the columns"), (5, torch.float16, 40, "every second column")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("experts", "dtype", "rank", "layout"),
    [
        case if case in ON_A_PUSH else pytest.param(*case, marks=pytest.mark.full)
        for case in product([1, 5], DTYPES, [3, 16, 40], LAYOUTS)
    ],
)
def test_low_rank_products(
    low_rank_kernels: ModuleType, experts: int, dtype: torch.dtype, rank: int, layout: str
) -> None:
    order, counts = shuffled(13, 3, 5)
    weights = random(39, seed=5)
    if experts == 1:
        counts = [39]
    ends = None if experts == 1 else torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    x, dout = random(39, 72, dtype=dtype), LAYOUTS[layout](random(39, 88, dtype=dtype, seed=1))
    of_rows = ends, counts
    for parts in (1, 2):
        A, B = random(experts, parts, rank, 72, seed=2), random(experts, parts, 88 // parts, rank, seed=3)
        split = dout if parts == 1 else dout.unflatten(1, (2, 44)) if rank == 3 else dout.unflatten(1, (44, 2)).mT
        narrow, product = both(low_rank_kernels, "low_rank", x, A, B, split, torch.zeros_like(split), *of_rows, 0.5)
        assert_alike(narrow, product)
        assert_alike(*both(low_rank_kernels, "low_rank", split, B.mT, A.mT, x, x.clone(), *of_rows, 0.5))
        assert_alike(*both(low_rank_kernels, "low_rank", x, A, None, None, None, *of_rows, 1.0))
        xA, dB = (random(39, parts, rank, dtype=dtype, seed=seed) for seed in (6, 7))
        for weighted in ((weights, order), (None, None)):
            gradients = torch.full_like(A, 7), torch.full_like(B, 7)
            rows = dB, x, xA, split
            assert_alike(*both(low_rank_kernels, "low_rank_gradients_", *rows, *gradients, *weighted, *of_rows, 0.5))


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


def test_columns_of_few_rows_are_divided(low_rank_kernels: ModuleType) -> None:
    """Each program then computes the narrow rows itself."""
    x, A, B, base = random(3, 24), random(1, 1, 4, 24, seed=1), random(1, 1, 3000, 4, seed=2), random(3, 3000, seed=3)
    assert_alike(*both(low_rank_kernels, "low_rank", x, A, B, base, torch.zeros_like(base), None, [3], 2.0))


def test_no_rows_at_all(interpreted: ModuleType) -> None:
    none, order = torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64)
    assert_alike(*both(interpreted, "gather_rows", none, order, 2, order.int()))
    assert_alike(*both(interpreted, "sum_rows_", none, none, order.int(), torch.zeros(0)))
    assert_alike(*both(interpreted, "add_rows_", none, none, order, 2, None))
    assert_alike(*both(interpreted, "gated", none, False, 1.0, 0.0))


@pytest.mark.full
def test_a_kernel_that_is_wrong_is_found_and_no_other(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(out: Tensor, *_: Any) -> None:
        out.fill_(torch.nan)

    monkeypatch.setattr(interpreted, "COLUMNS", 64)  # fewer programs
    right = interpreted.gated
    monkeypatch.setattr(interpreted, "gated", lambda *args: right(*args) * 1.01)
    monkeypatch.setattr(interpreted, "sum_rows_", lose)
    found = {}
    with torch.no_grad():
        for name, args in calls(torch.device("cpu"), torch.float32, 4, hidden=32, intermediate=32, rank=2):
            if hasattr(interpreted, name):
                off = next(differences(OPERATORS[name], args, getattr(interpreted, name)))
                if not is_alike(off, torch.float32):
                    found[name] = off
    assert found == {"sum_rows_": pytest.approx(torch.nan, nan_ok=True), "gated": pytest.approx(0.01, rel=0.05)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_where_triton_does_not_work_torch_computes_and_it_is_said() -> None:
    with pytest.warns(UserWarning, match="Triton does not work here .* experts run slower, and may take more memory"):
        assert kernels.on_gpu() is None
    with warnings.catch_warnings(action="error"):
        assert kernels.on_gpu() is None  # said once
    kernels.on_gpu.cache_clear()
