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

from moetune.experts.kernels import operators as kernels
from moetune.experts.kernels.grouped import Rows


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
    """Factors of a projection: W + scale · B·A, or of gate and up each its own, on their rows of W.

    What a pass has computed with them is kept for their gradients: it is narrow.

    Attributes:
        A_all, B_all: [n, P, r, in] and [n, P, out / P, r], of all n experts that have any, in P parts; these: [slots].
        is_interleaved: whether the parts take turns in the columns of the output.
        xA: [N, P, r], of the rows that came in.
        dB: [N, P, r], of the gradients of those that went out.
    """

    A_all: nn.Parameter
    B_all: nn.Parameter
    slots: slice
    is_interleaved: bool
    scale: float
    xA: Tensor | None = None
    dB: Tensor | None = None

    @cached_property
    def A(self) -> Tensor:
        """[C, P, r, in]"""
        return self.A_all[self.slots]

    @cached_property
    def B(self) -> Tensor:
        """[C, P, out / P, r]"""
        return self.B_all[self.slots]

    def add_forward(self, base: Tensor, out: Tensor, x: Tensor, rows: Rows) -> None:
        """out = base + their share."""
        base, out = self._parts_of(base), self._parts_of(out)
        self.xA = kernels.low_rank(x, self.A, self.B, base, out, rows.ends, rows.counts, self.scale)

    def add_grad_input(self, base: Tensor, out: Tensor, dout: Tensor, rows: Rows) -> None:
        """out = base + their share of the gradient of what came in."""
        dout = self._parts_of(dout)
        self.dB = kernels.low_rank(dout, self.B.mT, self.A.mT, base, out, rows.ends, rows.counts, self.scale)

    def add_gradients(self, grads: Gradients, x: Tensor, dout: Tensor, rows: Rows, weighted: Weighted | None) -> None:
        """Of A and B, if rows' gradients are `dout` times their weight. Uses up what was kept."""
        dout = self._parts_of(dout)
        of_A, of_B = (grads.of(parameter)[self.slots] for parameter in (self.A_all, self.B_all))
        groups = rows.ends, rows.counts
        xA = kernels.low_rank(x, self.A, None, None, None, *groups, 1.0) if self.xA is None else self.xA
        dB = kernels.low_rank(dout, self.B.mT, None, None, None, *groups, 1.0) if self.dB is None else self.dB
        self.xA = self.dB = None
        kernels.low_rank_gradients_(dB, x, xA, dout, of_A, of_B, *(weighted or (None, None)), *groups, self.scale)

    def _parts_of(self, wide: Tensor) -> Tensor:
        """[N, out] -> [N, P, out / P], or as it is where there is one part."""
        parts = self.A_all.shape[1]
        if parts == 1:
            return wide
        return wide.unflatten(1, (-1, parts)).mT if self.is_interleaved else wide.unflatten(1, (parts, -1))


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
    low_rank: LowRank | None = None

    @property
    def trains(self) -> bool:
        return bool(self.trained) or self.low_rank is not None

    def forward(self, x: Tensor, rows: Rows, weights: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out], a fresh tensor, or `into`. Pass `weights` where they are unpacked already."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = rows.linear(x, self.weights() if weights is None else weights, bias)
        if self.low_rank is None:
            return out if into is None else into.copy_(out)
        into = out if into is None else into
        self.low_rank.add_forward(out, into, x, rows)
        return into

    def grad_input(self, dout: Tensor, rows: Rows, weights: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """The gradient of the rows that came in: [N, out] -> [N, in], a fresh tensor, or `into`."""
        dx = rows.mm(dout, self.weights() if weights is None else weights)
        if self.low_rank is None:
            return dx if into is None else into.copy_(dx)
        into = dx if into is None else into
        self.low_rank.add_grad_input(dx, into, dout, rows)
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
        if self.low_rank is not None:
            self.low_rank.add_gradients(grads, x, dout, rows, weighted)
