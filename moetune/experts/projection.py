"""A linear map of each expert of a group, forward and backward, whatever its weights are made of.

Shapes: C experts of the group, N their rows, in and out features; r rank. Every method takes and gives rows in the
compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from moetune.experts.grouped import Rows

Gradients = dict[nn.Parameter, Tensor]


@dataclass
class LowRank:
    """Factors on the output rows `columns` of a projection: W[columns] + scale · B·A.

    `A_all` [n, parts, r, in] and `B_all` [n, parts, out / parts, r] hold the factors of all n experts that have any;
    these are [slots, part], in `dtype`. What a pass has computed with them is kept for their gradients: it is narrow.

    Attributes:
        xA: [N, r], of the rows that came in.
        dB: [N, r], of the gradients of those that went out.
    """

    A_all: nn.Parameter
    B_all: nn.Parameter
    slots: slice
    part: int
    columns: slice
    scale: float
    dtype: torch.dtype
    xA: Tensor | None = None
    dB: Tensor | None = None

    @cached_property
    def A(self) -> Tensor:
        """[C, r, in]"""
        return self.A_all[self.slots, self.part].to(self.dtype)

    @cached_property
    def B(self) -> Tensor:
        """[C, out, r]"""
        return self.B_all[self.slots, self.part].to(self.dtype)

    def add_forward(self, out: Tensor, x: Tensor, rows: Rows) -> None:
        self.xA = rows.mm(x, self.A.mT)
        rows.addmm_(out[:, self.columns], self.xA, self.B.mT, self.scale)

    def add_grad_input(self, dx: Tensor, dout: Tensor, rows: Rows) -> None:
        self.dB = rows.mm(dout[:, self.columns], self.B)
        rows.addmm_(dx, self.dB, self.A, self.scale)

    def gradients(self, x: Tensor, dout: Tensor, rows: Rows, weight_N1: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of A and B [C, …], if rows' gradients are `dout` times `weight`. Uses up what was kept."""
        dout = dout[:, self.columns]
        xA = rows.mm(x, self.A.mT) if self.xA is None else self.xA
        dB = rows.mm(dout, self.B) if self.dB is None else self.dB
        self.xA = self.dB = None
        factor = self.scale if weight_N1 is None else weight_N1 * self.scale
        return rows.outer(dB.mul_(factor), x), rows.outer(dout, xA.mul_(factor))


class FullProjection(nn.Module):
    """The weight [out, in] and bias [out] of one expert's projection that trains in full precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


@dataclass(frozen=True)
class Projection:
    """out = W·x + b + scale·B·(A·x), of each expert. `weights()` unpacks all W [C, out, in] anew on each call; the
    caller keeps or frees them.

    Attributes:
        bias: [C, out].
        trained: the projection of a group's only expert, where it trains in full.
    """

    weights: Callable[[], Tensor]
    bias: Tensor | None
    trained: FullProjection | None = None
    low_rank: tuple[LowRank, ...] = ()

    @property
    def trains(self) -> bool:
        return self.trained is not None or bool(self.low_rank)

    def forward(self, x: Tensor, rows: Rows, weights: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out], a fresh tensor. Pass `weights` where they are unpacked already."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = rows.linear(x, self.weights() if weights is None else weights, bias)
        for part in self.low_rank:
            part.add_forward(out, x, rows)
        return out

    def grad_input(self, dout: Tensor, rows: Rows, weights: Tensor | None = None) -> Tensor:
        """The gradient of the rows that came in: [N, out] -> [N, in], a fresh tensor."""
        dx = rows.mm(dout, self.weights() if weights is None else weights)
        for part in self.low_rank:
            part.add_grad_input(dx, dout, rows)
        return dx

    def add_gradients(
        self, grads: Gradients, x: Tensor, dout: Tensor, rows: Rows, weight_N1: Tensor | None = None
    ) -> None:
        """Adds to `grads` what input rows [N, in] and output gradients [N, out], each times its row's weight, mean for
        the tensors that train."""
        if self.trained is not None:
            weighted = dout if weight_N1 is None else dout * weight_N1
            grads[self.trained.weight] = (weighted.T @ x).to(self.trained.weight.dtype)
            if self.trained.bias is not None:
                grads[self.trained.bias] = weighted.sum(0).to(self.trained.bias.dtype)
        for part in self.low_rank:
            of_A, of_B = part.gradients(x, dout, rows, weight_N1)
            _add_slices(grads, part.A_all, part, of_A)
            _add_slices(grads, part.B_all, part, of_B)


def _add_slices(grads: Gradients, parameter: nn.Parameter, part: LowRank, gradients: Tensor) -> None:
    if parameter not in grads:
        grads[parameter] = torch.zeros_like(parameter)
    grads[parameter][part.slots, part.part] = gradients
