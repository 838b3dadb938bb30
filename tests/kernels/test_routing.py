"""Choice and sorting: gradients are autograd's, and Triton's interpreter gives what torch's operations give."""

from types import ModuleType

import pytest
import torch

from moetune.kernels import routing as kernels
from tests.kernels.interpreter import interpreted_module
from tests.kernels.test_operators import assert_alike, both, random


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    module = interpreted_module("triton_routing")
    module.LOGITS, module.NUMBERS, module.AT_ONCE = 32, 16, 64  # several tiles
    return module


@pytest.mark.parametrize("normalized", [True, False])
def test_the_gradient_is_that_of_autograd(normalized: bool) -> None:
    logits = random(9, 12).requires_grad_()
    probabilities = logits.softmax(-1)
    weights, ids = probabilities.topk(3, -1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    found, chosen = kernels.choose(logits.detach(), 3, normalized, torch.float32)
    assert torch.equal(chosen, ids)
    torch.testing.assert_close(found, weights.detach(), rtol=1e-6, atol=0)
    assert torch.equal(kernels.weigh(logits.detach(), ids, normalized, torch.float32), found)
    dweights = random(9, 3, seed=1)
    (expected,) = torch.autograd.grad(weights, logits, dweights)
    gradient = kernels.weigh_backward(dweights, logits.detach(), ids, normalized)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (12, 5), (40, 1)])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_choices(interpreted: ModuleType, experts: int, top_k: int, normalized: bool, dtype: torch.dtype) -> None:
    """Logits of a token all differ, in float16 too."""
    orders = [torch.randperm(experts, generator=torch.Generator().manual_seed(token)) for token in range(11)]
    logits = torch.stack(orders).div(experts / 4).to(dtype)
    assert_alike(*both(interpreted, "choose", logits, top_k, normalized, dtype))
    ids = torch.stack(orders)[:, :top_k].contiguous()
    assert_alike(*both(interpreted, "weigh", logits, ids, normalized, torch.float32))
    assert_alike(*both(interpreted, "weigh_backward", random(11, top_k, dtype=dtype), logits, ids, normalized))


def test_of_equal_logits_the_first_are_chosen(interpreted: ModuleType) -> None:
    weights, ids = interpreted.choose(torch.zeros(3, 8), 4, True, torch.float32)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.equal(weights, torch.full((3, 4), 0.25))


def test_a_token_without_numbers_has_weights_that_show_it_and_experts_that_exist(interpreted: ModuleType) -> None:
    weights, ids = interpreted.choose(torch.full((1, 12), torch.nan), 3, False, torch.float32)
    assert sorted(ids.flatten().tolist()) == [0, 1, 2]
    assert weights.isnan().all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("size", "count"), [(0, 4), (1, 1), (100, 5), (67, 40)])
def test_sorting_is_stable_and_counts(interpreted: ModuleType, size: int, count: int) -> None:
    numbers = torch.randint(0, count, (size,), generator=torch.Generator().manual_seed(0))
    expected = torch.argsort(numbers, stable=True)
    counts = torch.bincount(numbers, minlength=count)
    for order, counted in (interpreted.sorted_positions(numbers, count), kernels.sorted_positions(numbers, count)):
        assert torch.equal(order, expected)
        assert torch.equal(counted.long(), counts)
