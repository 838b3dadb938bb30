"""The PTX of the kernels of heads and of routing gives what torch's operations give, and the self-check's tolerance."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from moetune.adapt.guard.comparison import differences
from moetune.kernels import (
    rotary,  # noqa: F401  defines its operators
    routing,  # noqa: F401  defines its operators
    triton_rotary,
    triton_routing,
)
from moetune.kernels.registry import OPERATORS
from tests.ptx.cases import Call, Draw
from tests.ptx.driver import emulated

CASES = [  # dtype, capability
    *((torch.bfloat16, one) for one in (86, 90)),
    *(pytest.param(torch.bfloat16, one, marks=pytest.mark.full) for one in (80, 89, 100, 120)),
    *(pytest.param(dtype, one, marks=pytest.mark.full) for dtype in (torch.float16, torch.float32) for one in (86, 90)),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def rotations(draw: Draw, heads: int, key_heads: int, size: int) -> Iterator[Call]:
    """With norms, and angles that are the same for all rows; without norms, and angles of each row."""
    q, k = (draw.normal(2, 3, count, size).transpose(1, 2) for count in (heads, key_heads))
    norms = [draw.normal(size) for _ in range(2)]
    for rows, weights, kept in ((1, norms, [q, k]), (2, [None, None], [None, None])):
        angles = [draw.normal(rows, 3, size) for _ in range(2)]
        yield "rotate", [q, k, *angles, *weights, 1e-6]
        yield "rotate_backward", [draw.normal(*q.shape), k, *kept, *angles, *weights, 1e-6]


def choices(draw: Draw, tokens: int, experts: int, top_k: int) -> Iterator[Call]:
    """Logits of a token all differ: equal ones may be chosen in any order."""
    orders = torch.stack([draw.permutation(experts) for _ in range(tokens)])
    logits, ids = orders.div(experts / 4).to(draw.dtype), orders.topk(top_k).indices
    for normalized in (True, False):
        yield "choose", [logits, top_k, normalized, draw.dtype]
        yield "weigh", [logits, ids, normalized, torch.float32]
        yield "weigh_backward", [draw.normal(tokens, top_k), logits, ids, normalized]
    yield "sorted_positions", [ids.flatten(), experts]
    yield "sorted_positions", [ids.flatten().repeat(40), experts]  # several blocks


@pytest.mark.parametrize(("dtype", "capability"), CASES, ids=lambda one: str(one).removeprefix("torch."))
def test_kernels_agree(dtype: torch.dtype, capability: int) -> None:
    draw = Draw(0, dtype)
    calls = [
        *(call for sizes in ((8, 2, 128), (3, 1, 20)) for call in rotations(draw, *sizes)),
        *(call for sizes in ((5, 128, 8), (20, 8, 2), (5, 60, 4)) for call in choices(draw, *sizes)),
    ]
    modules = vars(triton_rotary) | vars(triton_routing)
    with torch.no_grad(), emulated(capability):
        for name, args in calls:
            off = next(differences(OPERATORS[name], args, modules[name]))
            assert off <= TOLERANCE[dtype], (name, off)


def test_a_choice_of_equal_logits_is_of_the_first_and_without_numbers_of_experts_that_exist() -> None:
    logits = torch.zeros(2, 12)
    logits[1] = torch.nan
    with emulated(86):
        weights, ids = triton_routing.choose(logits, 3, True, torch.float32)
    assert ids[0].tolist() == [0, 1, 2]
    assert torch.equal(weights[0], torch.full((3,), 1 / 3))
    assert sorted(ids[1].tolist()) == [0, 1, 2]
    assert weights[1].isnan().all()


def test_without_tokens_nothing_is_launched() -> None:
    heads, angles = torch.zeros(1, 2, 0, 8), torch.zeros(1, 0, 8)
    with emulated(86) as driver:
        assert triton_rotary.rotate(heads, heads, angles, angles, None, None, 0.0)[0].shape == heads.shape
        order, ends = triton_routing.sorted_positions(torch.zeros(0, dtype=torch.int64), 4)
    assert (len(order), ends.tolist(), driver.launched) == (0, [0] * 4, [])
