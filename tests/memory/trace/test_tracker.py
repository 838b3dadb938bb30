"""Births and deaths, where a tracker sees something else than happens without it."""

import torch
from torch import Tensor

from moetune.memory.trace.tracker import Tracker


class Doubled(torch.autograd.Function):
    """Adds a gradient to itself by its own code."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad + grad


def added_up(uses: list[str]) -> list[tuple[str, bool]]:
    """(operation, whether it is alive at the end) of the large storages that backward makes, `x` being used so."""
    x = torch.ones(64, 64, requires_grad=True)
    with torch.enable_grad():
        hidden = x * 2
        used = {
            "product": lambda: hidden * 3,
            "view": lambda: (hidden.view(4096) * 3).view(64, 64),
            "own": lambda: Doubled.apply(hidden),
        }
        loss = torch.stack([used[use]().sum() for use in uses]).sum()
    tracker = Tracker({})
    tracker.enter("backward")
    with tracker:
        loss.backward()
    return [(b.op, b.died is None) for b in tracker.log.blocks if b.bytes == 4 * 64 * 64]


def test_a_gradient_is_added_in_place() -> None:
    """Two products of a gradient, the second added onto the first; then the one for x, which stays."""
    assert added_up(["product", "product"]) == [("mul.Tensor", False), ("mul.Tensor", False), ("mul.Tensor", True)]


def test_a_view_keeps_what_it_is_of() -> None:
    """Gradients arrive last use first: nothing is added onto a view, which autograd does not hold alone."""
    made = added_up(["product", "view"])
    assert [op for op, _ in made].count("add.Tensor") == 1


def test_what_python_adds_up_is_no_sum_of_autograd() -> None:
    made = added_up(["own"])
    assert ("add.Tensor", False) in made
