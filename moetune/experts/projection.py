"""A linear map of each expert of a group, forward and backward, whatever its weights are made of.

Shapes: C experts of the group, N their rows, in and out features; r rank. Rows are in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moetune.experts.kernels import operators as kernels
from moetune.experts.kernels.grouped import GroupedGemm


class RowWeights(NamedTuple):
    """Routing weight of each of N rows: all weights, flat [T·K], and the rows' positions among them [N]."""

    weights: Tensor
    order: Tensor

    def column(self, dtype: torch.dtype) -> Tensor:
        """[N, 1]"""
        return self.weights[self.order, None].to(dtype)


class Gradients(dict[nn.Parameter, Tensor]):
    """Gradients of a layer's experts, by parameter.

    Args:
        hook: takes each fully trained parameter and its gradient, which then does not go to autograd.
        complete: every expert receives rows. Otherwise the gradients of factors start as zeros.
    """

    def __init__(self, hook: Callable[[nn.Parameter, Tensor], None] | None, *, complete: bool) -> None:
        super().__init__()
        self.hook, self._like = hook, torch.empty_like if complete else torch.zeros_like
        self._handed_over: set[nn.Parameter] = set()

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor that a parameter's gradient is written to."""
        if parameter not in self:
            self[parameter] = self._like(parameter)
        return self[parameter]

    def hand_over(self, projection: Projection) -> None:
        """Call the hook, if there is one, for all that trains in full of a projection; with zeros if it had no rows."""
        if self.hook is None:
            return
        for full in projection.trained:
            for parameter in full.parameters():
                self._handed_over.add(parameter)
                self.hook(parameter, self.pop(parameter) if parameter in self else torch.zeros_like(parameter))

    def remaining(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what goes to autograd: None for what was handed over, and zeros for an expert without tokens, because
        optimizers and reductions skip a missing gradient."""
        if parameter in self._handed_over:
            return None
        return self[parameter] if parameter in self else torch.zeros_like(parameter)


@dataclass
class LowRank:
    """Low-rank factors of a projection, in P parts: W + scale · B·A, or one such product for gate and one for up.

    The narrow products of forward and backward are kept until the factors' gradients are computed.

    Attributes:
        A_all, B_all: [n, P, r, in] and [n, P, out / P, r] of all experts with factors; the group has those at `slots`.
        is_interleaved: the parts alternate in the columns of the output.
        xA: [N, P, r], from the input rows.
        dB: [N, P, r], from the gradients of the output rows.
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

    def add_forward(self, base: Tensor, out: Tensor, x: Tensor, gemm: GroupedGemm) -> None:
        """out = base + scale · B·(A·x)"""
        base, out = self._in_parts(base), self._in_parts(out)
        self.xA = kernels.low_rank(x, self.A, self.B, base, out, gemm.ends, gemm.counts, self.scale)

    def add_grad_input(self, base: Tensor, out: Tensor, dout: Tensor, gemm: GroupedGemm) -> None:
        """out = base + scale · Aᵀ·(Bᵀ·dout)"""
        dout = self._in_parts(dout)
        self.dB = kernels.low_rank(dout, self.B.mT, self.A.mT, base, out, gemm.ends, gemm.counts, self.scale)

    def add_gradients(
        self, grads: Gradients, x: Tensor, dout: Tensor, gemm: GroupedGemm, weights: RowWeights | None
    ) -> None:
        """Add the gradients of A and B, from output gradients `dout` times `weights`. Frees the narrow products."""
        dout = self._in_parts(dout)
        of_A, of_B = (grads.of(parameter)[self.slots] for parameter in (self.A_all, self.B_all))
        groups = gemm.ends, gemm.counts
        xA = kernels.low_rank(x, self.A, None, None, None, *groups, 1.0) if self.xA is None else self.xA
        dB = kernels.low_rank(dout, self.B.mT, None, None, None, *groups, 1.0) if self.dB is None else self.dB
        self.xA = self.dB = None
        kernels.low_rank_gradients_(dB, x, xA, dout, of_A, of_B, *(weights or (None, None)), *groups, self.scale)

    def _in_parts(self, wide: Tensor) -> Tensor:
        """[N, out] -> [N, P, out / P]; unchanged for one part."""
        parts = self.A_all.shape[1]
        if parts == 1:
            return wide
        return wide.unflatten(1, (-1, parts)).mT if self.is_interleaved else wide.unflatten(1, (parts, -1))


class FullProjection(nn.Module):
    """Weight [out, in] and bias [out] of one expert's projection, trained in full precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


@dataclass(frozen=True)
class Projection:
    """out = W·x + b + scale·B·(A·x), of each expert.

    Attributes:
        weights: dequantizes all W [C, out, in], anew on each call; the caller keeps or frees them.
        bias: [C, out].
        trained: the group's projections, if they train in full.
    """

    weights: Callable[[], Tensor]
    bias: Tensor | None
    trained: tuple[FullProjection, ...] = ()
    low_rank: LowRank | None = None

    @property
    def trains(self) -> bool:
        return bool(self.trained) or self.low_rank is not None

    def forward(
        self, x: Tensor, gemm: GroupedGemm, weights: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """[N, in] -> [N, out], a new tensor or `into`. Pass `weights` that are dequantized already."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = gemm.linear(x, self.weights() if weights is None else weights, bias)
        if self.low_rank is None:
            return out if into is None else into.copy_(out)
        into = out if into is None else into
        self.low_rank.add_forward(out, into, x, gemm)
        return into

    def grad_input(
        self, dout: Tensor, gemm: GroupedGemm, weights: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Gradient of the input rows: [N, out] -> [N, in], a new tensor or `into`."""
        dx = gemm.mm(dout, self.weights() if weights is None else weights)
        if self.low_rank is None:
            return dx if into is None else into.copy_(dx)
        into = dx if into is None else into
        self.low_rank.add_grad_input(dx, into, dout, gemm)
        return into

    def add_gradients(
        self, grads: Gradients, x: Tensor, dout: Tensor, gemm: GroupedGemm, weights: RowWeights | None = None
    ) -> None:
        """Add the gradients of what trains, from input rows [N, in] and output gradients [N, out] times `weights`."""
        if self.trained:
            dout = dout if weights is None else dout * weights.column(dout.dtype)
            for full, of_weight in zip(self.trained, gemm.outer(dout, x), strict=True):
                grads[full.weight] = of_weight.to(full.weight.dtype)
            for full, rows in zip(self.trained, dout.split(gemm.counts), strict=True):
                if full.bias is not None:
                    grads[full.bias] = rows.sum(0).to(full.bias.dtype)
        if self.low_rank is not None:
            self.low_rank.add_gradients(grads, x, dout, gemm, weights)
