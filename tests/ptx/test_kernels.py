"""The kernels' PTX for each compute capability gives what torch's operations give."""

import pytest
import torch

pytest.importorskip("triton")

from moetune.adapt.guard.comparison import differences, is_alike
from moetune.kernels import triton_kernels
from moetune.kernels.registry import OPERATORS
from tests.kernels.recorded import calls
from tests.ptx import cases
from tests.ptx.cases import Call, Draw
from tests.ptx.driver import emulated

EACH = [pytest.param(one, marks=[pytest.mark.full] * (one not in (86, 90))) for one in (86, 90, 80, 89, 100, 120)]
PRODUCTS = (("low_rank", "forward"), ("low_rank", "backward"), ("low_rank_gradients_", ""))
RANDOM = [  # seed, capability: 20 on each, and 40 by turns
    *(pytest.param(seed, *one.values, marks=one.marks) for seed in range(20) for one in EACH),
    *(pytest.param(seed, *EACH[(seed // 10 + seed) % 6].values, marks=pytest.mark.full) for seed in range(20, 60)),
]
RANKS = [  # rank, capability, experts, parts
    *((rank, one, *of) for rank in (64, 300) for one in (86, 90) for of in ((1, 1), (5, 2))),
    *(
        pytest.param(rank, one, *of, marks=pytest.mark.full)
        for rank in (4, 12, 16, 32, 128, 256, 512, 600, 1024)
        for one in (86, 90)
        for of in ((1, 1), (5, 2))
    ),
    *(
        pytest.param(rank, one, 5, 2, marks=pytest.mark.full)
        for rank in (4, 64, 256, 600, 1024)
        for one in (80, 89, 100, 120)
    ),
]


def assert_agrees(call: Call, dtype: torch.dtype) -> None:
    name, args = call
    difference = next(differences(OPERATORS[name], args, getattr(triton_kernels, name)))
    assert is_alike(difference, dtype), f"{name}: off by {difference:.1e} of the largest"


@pytest.mark.parametrize("capability", EACH)
def test_the_self_check_passes(capability: int) -> None:
    with torch.no_grad(), emulated(capability) as driver:
        for call in calls(torch.device("cpu"), torch.bfloat16, 80):
            if hasattr(triton_kernels, call[0]):
                assert_agrees(call, torch.bfloat16)
    assert len(driver.launched) > 15


@pytest.mark.parametrize(("seed", "capability"), RANDOM)
def test_a_random_call_agrees(seed: int, capability: int) -> None:
    with torch.no_grad(), emulated(capability):
        assert_agrees(cases.case(seed), cases.dtype_of(seed))


@pytest.mark.parametrize(("rank", "capability", "experts", "parts"), RANKS)
def test_every_rank_agrees(rank: int, capability: int, experts: int, parts: int) -> None:
    """Up to ranks of several tiles, for one expert and for several, with factors of gate and up apart."""
    draw = Draw(rank + experts, torch.bfloat16)
    with torch.no_grad(), emulated(capability):
        for name, kind in PRODUCTS:
            assert_agrees(cases.low_rank(draw, name, 40, experts, rank, parts, 96, 44, kind), torch.bfloat16)


def test_columns_of_few_rows_are_divided() -> None:
    """Each program then computes the narrow rows itself."""
    with torch.no_grad(), emulated(86):
        call = cases.low_rank(Draw(0, torch.bfloat16), "low_rank", 3, 1, 4, 1, 24, 3000, "forward")
        assert_agrees(call, torch.bfloat16)


def test_no_rows_at_all() -> None:
    rows, order = torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64)
    with emulated(86) as driver:
        assert triton_kernels.gather_rows(rows, order, 2, order.int()).shape == (0, 8)
        assert triton_kernels.gated(rows, False, 1.0, 0.0).shape == (0, 4)
        triton_kernels.sum_rows_(rows, rows, order.int(), torch.zeros(0))
        triton_kernels.add_rows_(rows, rows, order, 2, None)
    assert not driver.launched


@pytest.mark.full
def test_factors_of_more_than_two_billion_elements() -> None:
    """The third expert's begin at element 2^31. What lies between the experts' is never touched."""
    draw = Draw(0, torch.bfloat16)
    ends, counts, x = torch.tensor([0, 1, 3], dtype=torch.int32), [0, 1, 2], draw.normal(3, 32)
    near = draw.normal(3, 1, 16, 32)
    far = torch.empty(2**31 + 16 * 32, dtype=near.dtype).as_strided(near.shape, (2**30, 0, 32, 1))
    for one, other in zip(far, near, strict=True):
        one.copy_(other)
    narrow = draw.normal(3, 1, 16)
    with torch.no_grad(), emulated(86):
        found, expected = (
            triton_kernels.low_rank(x, factors, None, None, None, ends, counts, 1.0) for factors in (far, near)
        )
        for factors in (far, near):
            args = narrow, x, narrow, narrow[:, 0], factors, torch.zeros(3, 1, 16, 16), None, None, ends, counts, 1.0
            triton_kernels.low_rank_gradients_(*args)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(far, near, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("capability", EACH)
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
            cases.low_rank(draw, name, 40, experts, rank, *projection, kind)
            for name, kind in PRODUCTS
            for projection in projections
        ),
        *(cases.gated(draw, name, 5, intermediate, gate) for name in ("gated", "gated_backward_")),
        *(cases.rows(draw, name, 5, hidden, 4) for name in ("gather_rows", "sum_rows_", "add_rows_")),
        cases.nf4(draw, experts, (16, hidden), double_quant=True),
    ]
    with torch.no_grad(), emulated(capability):
        for call in calls:
            assert_agrees(call, torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("capability", [86, 120])  # whose blocks may have the least
@pytest.mark.parametrize(("dtype", "rank"), [(torch.bfloat16, 256), (torch.float32, 64)])
def test_kernels_fit(dtype: torch.dtype, rank: int, capability: int) -> None:
    """Compiled to machine code for Qwen3-30B-A3B's width, none needs more shared memory than a block may have."""
    with torch.no_grad(), emulated(capability, executes=False):
        for name, args in calls(torch.device("cpu"), dtype, 8, hidden=2048, intermediate=768, rank=rank):
            if hasattr(triton_kernels, name):
                getattr(triton_kernels, name)(*args)
