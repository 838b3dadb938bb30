"""A linear map of each expert of a group, forward and backward, whatever its weights are made of.

Shapes: C experts of the group, N their rows, in and out features; r rank. Every method takes and gives rows in the
compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moetune.experts import kernels
from moetune.experts.grouped import Rows


class Weighted(NamedTuple):
    """Which routing weight each of N rows has: all of them, flat [T·K], and the rows' positions among them [N]."""

    weights: Tensor
    order: Tensor

    def column(self, dtype: torch.dtype) -> Tensor:
        """[N, 1]"""
        return self.weights[self.order, None].to(dtype)


class Gradients(dict[nn.Parameter, Tensor]):
    """By parameter.

    Args:
        complete: whether every expert belongs to a group whose gradients come: those of factors need no zeros then.
    """

    def __init__(self, *, complete: bool) -> None:
        super().__init__()
        self._like = torch.empty_like if complete else torch.zeros_like

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that takes a parameter's gradient."""
        if parameter not in self:
            self[parameter] = self._like(parameter)
        return self[parameter]


@dataclass
class LowRank:
    """Factors on the output rows `columns` of a projection: W[columns] + scale · B·A.

    What a pass has computed with them is kept for their gradients: it is narrow.

    Attributes:
        A_all, B_all: [n, parts, r, in] and [n, parts, out / parts, r], of all n experts that have any; these are
            [slots, part].
        xA: [N, r], of the rows that came in.
        dB: [N, r], of the gradients of those that went out.
    """

    A_all: nn.Parameter
    B_all: nn.Parameter
    slots: slice
    part: int
    columns: slice
    scale: float
    xA: Tensor | None = None
    dB: Tensor | None = None

    @cached_property
    def A(self) -> Tensor:
        """[C, r, in]"""
        return self.A_all[self.slots, self.part]

    @cached_property
    def B(self) -> Tensor:
        """[C, out, r]"""
        return self.B_all[self.slots, self.part]

    def add_forward(self, base: Tensor, out: Tensor, x: Tensor, rows: Rows) -> None:
        """out = base + their share."""
        base, out = base[:, self.columns], out[:, self.columns]
        self.xA = kernels.low_rank(x, self.A, self.B, base, out, rows.ends, rows.counts, self.scale)

    def add_grad_input(self, base: Tensor, out: Tensor, dout: Tensor, rows: Rows) -> None:
        """out = base + their share of the gradient of what came in."""
        dout = dout[:, self.columns]
        self.dB = kernels.low_rank(dout, self.B.mT, self.A.mT, base, out, rows.ends, rows.counts, self.scale)

    def add_gradients(self, grads: Gradients, x: Tensor, dout: Tensor, rows: Rows, weighted: Weighted | None) -> None:
        """Of A and B, if rows' gradients are `dout` times their weight. Uses up what was kept."""
        dout = dout[:, self.columns]
        of_A, of_B = (grads.of(parameter)[self.slots, self.part] for parameter in (self.A_all, self.B_all))
        groups = rows.ends, rows.counts
        xA = kernels.low_rank(x, self.A, None, None, None, *groups, 1) if self.xA is None else self.xA
        dB = kernels.low_rank(dout, self.B.mT, None, None, None, *groups, 1) if self.dB is None else self.dB
        self.xA = self.dB = None
        kernels.low_rank_gradients_(dB, x, xA, dout, of_A, of_B, *(weighted or (None, None)), *groups, self.scale)


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
        trained: the projections of the group's experts, where they train in full.
    """

    weights: Callable[[], Tensor]
    bias: Tensor | None
    trained: tuple[FullProjection, ...] = ()
    low_rank: tuple[LowRank, ...] = ()

    @property
    def trains(self) -> bool:
        return bool(self.trained or self.low_rank)

    def forward(self, x: Tensor, rows: Rows, weights: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out], a fresh tensor, or `into`. Pass `weights` where they are unpacked already."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = rows.linear(x, self.weights() if weights is None else weights, bias)
        return self._with_factors(out, into, lambda part, base, to: part.add_forward(base, to, x, rows))

    def grad_input(self, dout: Tensor, rows: Rows, weights: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """The gradient of the rows that came in: [N, out] -> [N, in], a fresh tensor, or `into`."""
        dx = rows.mm(dout, self.weights() if weights is None else weights)
        return self._with_factors(dx, into, lambda part, base, to: part.add_grad_input(base, to, dout, rows))

    def _with_factors(self, out: Tensor, into: Tensor | None, add: Callable[[LowRank, Tensor, Tensor], None]) -> Tensor:
        """`out` and the share of all factors, which `add` puts from one tensor into another: `into`, or in place."""
        if not self.low_rank:
            return out if into is None else into.copy_(out)
        into = out if into is None else into
        for part in self.low_rank:
            add(part, out, into)
            out = into
        return into

    def add_gradients(
        self, grads: Gradients, x: Tensor, dout: Tensor, rows: Rows, weighted: Weighted | None = None
    ) -> None:
        """Adds to `grads` what input rows [N, in] and output gradients [N, out], each times its row's weight, mean for
        the tensors that train."""
        if self.trained:
            dout = dout if weighted is None else dout * weighted.column(dout.dtype)
            for full, of_weight in zip(self.trained, rows.outer(dout, x), strict=True):
                grads[full.weight] = of_weight.to(full.weight.dtype)
            for full, part in zip(self.trained, dout.split(rows.counts), strict=True):
                if full.bias is not None:
                    grads[full.bias] = part.sum(0).to(full.bias.dtype)
        for low_rank in self.low_rank:
            low_rank.add_gradients(grads, x, dout, rows, weighted)
