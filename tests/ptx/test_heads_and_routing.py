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
    """With norms and without; the angles of all rows are the same."""
    q, k = (draw.normal(2, 3, count, size).transpose(1, 2) for count in (heads, key_heads))
    angles, norms = [draw.normal(1, 3, size) for _ in range(2)], [draw.normal(size) for _ in range(2)]
    for weights, kept in ((norms, [q, k]), ([None, None], [None, None])):
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
