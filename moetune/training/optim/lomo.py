"""LOMO, AdaLomo and Adafactor: optimizers with almost no state.

With weights w, gradient g, learning rate η, weight decay λ, threshold d, minimum ε, and RMS for root mean square:

    LOMO       w ← (1 - η·λ)·w - η·g                                       arXiv 2306.09782, algorithm 1
    AdaLomo    û = g / √v, v factored by rows and columns                  arXiv 2310.10195, algorithm 1
               w ← (1 - η'·λ)·w - η'·û / max(1, RMS(û) / d),   η' = η · max(ε, RMS(w))
    Adafactor  as AdaLomo, with min(η, 1/√t) at step t instead of η        arXiv 1804.04235, algorithm 4

All three compute in float32 and round the result to the dtype of the weights once. Float32 copies are made of one block
of a matrix at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

BLOCK = 2**22  # weights that are copied to float32 at a time; a copy has 16 MiB
_DECAY = 0.8  # at step t the decay of the average v is 1 - t^-0.8
_THRESHOLD = 1.0  # d, the largest RMS of û before û is scaled down
_LEAST_SQUARE, _LEAST_WEIGHT = 1e-30, 1e-3  # a number added to g²; ε, the smallest RMS(w) that is used


class ScalingOptimizer(torch.optim.Optimizer, ABC):
    """Base class of optimizers whose `step` multiplies the gradients by a scale, in float32."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None, *, scale: float = 1.0) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, with `scale` times the gradient, which itself is not changed.

        `closure`, which torch's optimizers have, is not used.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, scale)

    @abstractmethod
    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], scale: float) -> None:
        """Update one parameter in place by `scale` times `grad`, with the settings of its parameter group."""


class Lomo(ScalingOptimizer):
    """Gradient descent with weight decay, stateless. With float32 weights it equals `torch.optim.SGD` bit for bit."""

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], scale: float) -> None:
        for where in _blocks(parameter):
            weight, step = parameter[where].float(), grad[where].float()
            if scale != 1.0:
                step = step * scale
            if group["weight_decay"]:
                step = step.add(weight, alpha=group["weight_decay"])
            parameter[where] = weight.add(step, alpha=-group["lr"])


class AdaLomo(ScalingOptimizer):
    """AdaLomo: divides each element of the gradient by √v, v from running means of squares in its row and its column.

    A tensor with more than two dimensions is a stack of matrices, each updated on its own. The state of a matrix [R, C]
    is R + C float32 numbers, that of a vector one float32 number per element.
    """

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], scale: float) -> None:
        state = self.state[parameter]
        is_vector = parameter.dim() < 2
        if not state:
            state["step"] = 0
            rows, columns = parameter.shape[:-1], (*parameter.shape[:-2], parameter.shape[-1])
            shapes = {"square": parameter.shape} if is_vector else {"rows": rows, "columns": columns}
            for name, shape in shapes.items():
                state[name] = parameter.new_zeros(shape, dtype=torch.float32)
        state["step"] += 1
        beta2, rate = 1 - state["step"] ** -_DECAY, self._rate(group, state["step"])
        if is_vector:
            gradient = grad.float() * scale
            state["square"].mul_(beta2).add_(gradient.square().add_(_LEAST_SQUARE), alpha=1 - beta2)
            by_element = state["square"].rsqrt()
            _descend(parameter, lambda where: gradient[where] * by_element[where], rate, group)
            return
        matrices = zip(
            parameter.flatten(0, -3) if parameter.dim() > 2 else parameter[None],
            grad.flatten(0, -3) if parameter.dim() > 2 else grad[None],
            state["rows"].view(-1, parameter.shape[-2]),
            state["columns"].view(-1, parameter.shape[-1]),
            strict=True,
        )
        for weight, gradient, rows, columns in matrices:
            rows.mul_(beta2)
            columns.mul_(beta2)
            for where in _blocks(weight):
                square = (gradient[where].float() * scale).square_().add_(_LEAST_SQUARE)
                rows[where].add_(square.mean(-1), alpha=1 - beta2)
                columns.add_(square.sum(-2), alpha=(1 - beta2) / len(weight))
                del square  # freed before the next step allocates as much
            by_row = (rows / rows.mean()).rsqrt_()[:, None].mul_(scale)
            by_column = columns.rsqrt()
            _descend(weight, partial(_scaled, gradient, by_row, by_column), rate, group)

    def _rate(self, group: dict[str, Any], step: int) -> float:
        """Return η at a step, counted from 1."""
        return group["lr"]


class Adafactor(AdaLomo):
    """AdaLomo with Adafactor's relative step size: η is at most 1/√t at step t."""

    def _rate(self, group: dict[str, Any], step: int) -> float:
        return min(group["lr"], step**-0.5)


def _scaled(gradient: Tensor, by_row: Tensor, by_column: Tensor, where: slice) -> Tensor:
    """Return rows of û = gradient · by_row · by_column, the update before its RMS is limited: float32 [rows, C].

    Args:
        gradient: [R, C], of the whole matrix.
        by_row: [R, 1], reciprocal roots of the second moments of the rows, divided by their mean.
        by_column: [C], reciprocal roots of the second moments of the columns.
        where: the rows to compute.
    """
    return gradient[where].float() * by_row[where] * by_column


def _descend(weight: Tensor, update: Callable[[slice], Tensor], rate: float, group: dict[str, Any]) -> None:
    """Limit the RMS of an update, and subtract it from `weight` in place, block by block.

    Args:
        update: returns û of some rows of the weight, as a new float32 tensor; called twice for each block.
        rate: η of the module's formulas.
        group: the parameter group, with `weight_decay`.
    """
    blocks = list(_blocks(weight))
    of_update = torch.stack([update(where).square_().sum() for where in blocks]).sum()
    of_weight = torch.stack([weight[where].float().square().sum() for where in blocks]).sum()
    lr = rate * (of_weight / weight.numel()).sqrt_().clamp_(min=_LEAST_WEIGHT)
    step = lr / ((of_update / weight.numel()).sqrt_() / _THRESHOLD).clamp_(min=1.0)
    for where in blocks:
        new = weight[where].float()  # of float32 weights no copy, but a view
        if group["weight_decay"]:
            new.mul_(1 - lr * group["weight_decay"])
        weight[where] = new.sub_(update(where).mul_(step))


def _blocks(weight: Tensor) -> Iterator[slice]:
    """Return slices of a tensor's first axis, each of at most `BLOCK` elements or, if a row has more, of one row."""
    rows = max(1, BLOCK * len(weight) // max(1, weight.numel()))
    return (slice(start, start + rows) for start in range(0, len(weight), rows))
