"""Choice and sorting: gradients are autograd's, and sorting is stable."""

import pytest
import torch

from moetune.kernels import routing as kernels
from tests.kernels.test_operators import random


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


@pytest.mark.parametrize(("size", "count"), [(0, 4), (1, 1), (100, 5), (67, 300)])
def test_sorting_is_stable_and_counts(size: int, count: int) -> None:
    numbers = torch.randint(0, count, (size,), generator=torch.Generator().manual_seed(0))
    order, ends = kernels.sorted_positions(numbers, count)
    assert torch.equal(order, torch.argsort(numbers, stable=True))
    assert torch.equal(ends.long(), torch.bincount(numbers, minlength=count).cumsum(0))
