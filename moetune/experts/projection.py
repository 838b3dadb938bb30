"""One expert's linear map, forward and backward, whatever its weight is made of.

Shapes: N rows, in and out features; r rank. Every method takes and gives rows in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Gradients = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class LowRank:
    """Factors on the output rows `rows` of a projection: W[rows] + scale · B·A.

    `A_all` [n, parts, r, in] and `B_all` [n, parts, out / parts, r] hold the factors of all n experts that have any;
    these are [slot, part].
    """

    A_all: nn.Parameter
    B_all: nn.Parameter
    slot: int
    part: int
    rows: slice
    scale: float

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(A [r, in], B [out, r]), unscaled."""
        return self.A_all[self.slot, self.part].to(dtype), self.B_all[self.slot, self.part].to(dtype)


class FullProjection(nn.Module):
    """The weight [out, in] and bias [out] of one expert's projection that trains in full precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


@dataclass(frozen=True)
class Projection:
    """out = W·x + b + scale·B·(A·x). `weight()` unpacks W [out, in] anew on each call; the caller keeps or frees it."""

    weight: Callable[[], Tensor]
    bias: Tensor | None
    trained: FullProjection | None = None
    low_rank: tuple[LowRank, ...] = ()

    @property
    def trains(self) -> bool:
        return self.trained is not None or bool(self.low_rank)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out], a fresh tensor. Pass `weight` where it is unpacked already."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = linear(x, self.weight() if weight is None else weight, bias)
        for part in self.low_rank:
            A, B = part.factors(x.dtype)
            out[:, part.rows].addmm_(linear(x, A), B.T, alpha=part.scale)
        return out

    def grad_input(self, dout: Tensor, weight: Tensor | None = None) -> Tensor:
        """The gradient of the rows that came in: [N, out] -> [N, in], a fresh tensor."""
        dx = dout @ (self.weight() if weight is None else weight)
        for part in self.low_rank:
            A, B = part.factors(dout.dtype)
            dx.addmm_(dout[:, part.rows] @ B, A, alpha=part.scale)
        return dx

    def add_gradients(self, grads: Gradients, x: Tensor, dout: Tensor) -> None:
        """Adds to `grads` what input rows [N, in] and output gradients [N, out] mean for the tensors that train."""
        if self.trained is not None:
            grads[self.trained.weight] = (dout.T @ x).to(self.trained.weight.dtype)
            if self.trained.bias is not None:
                grads[self.trained.bias] = dout.sum(0).to(self.trained.bias.dtype)
        for part in self.low_rank:
            A, B = part.factors(x.dtype)
            rows = dout[:, part.rows]
            _add_slice(grads, part.A_all, part, (rows @ B).mul_(part.scale).T @ x)
            _add_slice(grads, part.B_all, part, rows.T @ linear(x, A).mul_(part.scale))


def _add_slice(grads: Gradients, parameter: nn.Parameter, part: LowRank, gradient: Tensor) -> None:
    if parameter not in grads:
        grads[parameter] = torch.zeros_like(parameter)
    grads[parameter][part.slot, part.part] = gradient
