"""A projection of a group of experts, forward and backward: quantized, trained, or with LoRA.

Shapes: C experts in the group with N rows together, `in` and `out` features, rank r. Rows are in the compute dtype.
Everywhere `gemm` (a `GroupedGemm`) says how many of the N rows belong to each expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from moetune.kernels import operators as kernels
from moetune.kernels.grouped import GroupedGemm


class RowWeights(NamedTuple):
    """Routing weights of a group's N rows.

    `weights` [T·K] has those of all rows of the layer, and `order` [N] the indices in it of the group's rows.
    """

    weights: Tensor
    order: Tensor

    def column(self, dtype: torch.dtype) -> Tensor:
        """Return the N weights as a new tensor [N, 1] in `dtype`."""
        return self.weights[self.order, None].to(dtype)


class Gradients(dict[nn.Parameter, Tensor]):
    """Gradients of one layer's expert parameters during a backward pass, by parameter.

    Args:
        hook: called with each fully trained parameter and its gradient, which is then not returned to autograd; None to
            return all gradients to autograd.
        complete: whether every expert has rows. If not, tensors from `of` start as zeros instead of uninitialized.
    """

    def __init__(self, hook: Callable[[nn.Parameter, Tensor], None] | None, *, complete: bool) -> None:
        super().__init__()
        self.hook, self._like = hook, torch.empty_like if complete else torch.zeros_like
        self._handed_over: set[nn.Parameter] = set()

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor for a parameter's gradient, to be written in place; the first call allocates it."""
        if (gradient := self.get(parameter)) is None:
            gradient = self[parameter] = self._like(parameter)
        return gradient

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add `gradient`, of the rows of one group, to a parameter that all groups share. The sum is in float32."""
        gradient = gradient.float().view(parameter.shape)
        self[parameter] = self[parameter].add_(gradient) if parameter in self else gradient

    def hand_over(self, projection: "Projection") -> None:
        """Call the hook with each fully trained parameter of a projection and its gradient, or zeros if it has none.

        Does nothing if there is no hook.
        """
        if self.hook is None:
            return
        for full in projection.trained:
            for parameter in full.parameters():
                self._handed_over.add(parameter)
                self.hook(parameter, self.pop(parameter) if parameter in self else torch.zeros_like(parameter))

    def remaining(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter for autograd; None if the hook has received it.

        Zeros if the parameter's expert had no tokens: optimizers and reductions would skip a parameter without
        gradient.
        """
        if self._handed_over and parameter in self._handed_over:
            return None
        gradient = self.get(parameter)
        return torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)


@dataclass
class LowRank:
    """LoRA factors of a group's projection, W + scale · B·A, in P parts.

    P is 2 if gate and up have a product B·A each, else 1. The products with r columns, `xA` and `dB`, are kept from
    forward and backward until `add_gradients` computes the factors' gradients from them.

    Attributes:
        A_all: [n, P, r, in], the factors A of all n experts of the layer that have LoRA.
        B_all: [n, P, out / P, r], their factors B.
        slots: slice of the group's C experts in the first dimension of `A_all` and `B_all`.
        is_interleaved: columns of the two parts alternate in the output.
        scale: alpha / rank.
        parts: the output features of each part.
        is_joined: whether, in groups of several experts, one kernel computes the product with W and adds these terms
            (`join`).
        is_merged: whether the projection's weights contain B·A already: then only the gradients are computed here.
        shared: the factor, "A" or "B", of which the layer has one for all experts (n is 1): it is read in place for
            each expert, and its gradient is one product over all rows.
        xA: [N, P, r], input rows times Aᵀ; None until forward.
        dB: [N, P, r], gradients of the output rows times B; None until the gradient of the input rows is computed.
    """

    A_all: nn.Parameter
    B_all: nn.Parameter
    slots: slice
    is_interleaved: bool
    scale: float
    parts: tuple[slice, ...]
    is_joined: bool = False
    shared: Literal["A", "B"] | None = None
    is_merged: bool = False
    xA: Tensor | None = None
    dB: Tensor | None = None

    @cached_property
    def A(self) -> Tensor:
        """The group's factors A as a view [C, P, r, in]."""
        return self._of_group(self.A_all, is_shared=self.shared == "A")

    @cached_property
    def B(self) -> Tensor:
        """The group's factors B as a view [C, P, out / P, r]."""
        return self._of_group(self.B_all, is_shared=self.shared == "B")

    def _of_group(self, factor: Tensor, *, is_shared: bool) -> Tensor:
        return factor.expand(self.slots.stop - self.slots.start, -1, -1, -1) if is_shared else self._own(factor)

    def _own(self, of_all: Tensor) -> Tensor:
        """Return the part of the group's experts in a tensor of all n experts: a view, or the tensor itself."""
        return of_all if self.slots.stop - self.slots.start == of_all.shape[0] else of_all[self.slots]

    def merge_(self, index: int, weight: Tensor) -> None:
        """Add scale · B·A of one expert of the group, given its index in it, to its float32 weight [out, in]."""
        for part, A, B in zip(self.parts, self.A[index].float(), self.B[index].float(), strict=True):
            weight[part].addmm_(B, A, alpha=self.scale)  # as an export merges, so that both round the same

    def add(self, base: Tensor, out: Tensor, rows: Tensor, gemm: GroupedGemm, *, backward: bool) -> None:
        """Write `base` plus the low-rank terms of the rows to `out`, and keep the product with r columns.

        Forward, `rows` [N, in] are the input, `base` [N, out] is their product with W, and scale · B·(A·x) is added.
        In `backward`, `rows` [N, out] are the gradients of the output rows, `base` [N, in] is their product with W, and
        scale · Aᵀ·(Bᵀ·dout) is added. `out` may be `base` itself.
        """
        of_rows = gemm.ends, gemm.counts, self.scale
        if backward:
            self.dB = kernels.low_rank(self._in_parts(rows), self.B.mT, self.A.mT, base, out, *of_rows)
        else:
            self.xA = kernels.low_rank(rows, self.A, self.B, self._in_parts(base), self._in_parts(out), *of_rows)

    def join(self, rows: Tensor, matrices: Tensor, out: Tensor, gemm: GroupedGemm, *, backward: bool) -> None:
        """Write rows·matrices plus the low-rank terms to `out`, and keep the product with r columns, as `add` does.

        `matrices` [C, in, out] is Wᵀ; in `backward` [C, out, in], W.
        """
        of_rows = gemm.ends, gemm.counts
        if backward:
            second = self.A.mT
            few = self.dB = kernels.low_rank(self._in_parts(rows), self.B.mT, None, None, None, *of_rows, 1.0)
        else:
            second = self.B
            few = self.xA = kernels.low_rank(rows, self.A, None, None, None, *of_rows, 1.0)
        kernels.low_rank_product_(out, rows, matrices, few, second, *of_rows, self.scale, self.is_interleaved)

    def add_gradients(
        self, grads: Gradients, x: Tensor, dout: Tensor, gemm: GroupedGemm, weights: RowWeights | None
    ) -> None:
        """Write the gradients of A and B into `grads`, and free A·x and Bᵀ·dout.

        `x` [N, in] are the input rows, and `dout` [N, out] the gradients of the output rows, which are multiplied here
        by the routing weights, if given.
        """
        dout = self._in_parts(dout)
        of_A = None if self.shared == "A" else self._own(grads.of(self.A_all))
        of_B = None if self.shared == "B" else self._own(grads.of(self.B_all))
        groups = gemm.ends, gemm.counts
        xA = kernels.low_rank(x, self.A, None, None, None, *groups, 1.0) if self.xA is None else self.xA
        dB = kernels.low_rank(dout, self.B.mT, None, None, None, *groups, 1.0) if self.dB is None else self.dB
        self.xA = self.dB = None
        kernels.low_rank_gradients_(dB, x, xA, dout, of_A, of_B, *(weights or (None, None)), *groups, self.scale)
        if self.shared is None:
            return
        factor = self.scale if weights is None else weights.column(x.dtype)[:, None] * self.scale
        if self.shared == "A":
            grads.add(self.A_all, (dB * factor).flatten(1).T @ x)
        else:
            grads.add(self.B_all, dout.T @ (xA * factor).flatten(1))

    def _in_parts(self, wide: Tensor) -> Tensor:
        """Return a view [N, P, out / P] of [N, out]; the tensor itself if P is 1."""
        parts = self.A_all.shape[1]
        return wide if parts == 1 else kernels.in_parts(wide, parts, interleaved=self.is_interleaved)


class FullProjection(nn.Module):
    """Weight [out, in] and bias [out] of one fully trained expert's projection; the bias may be None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


@dataclass(frozen=True)
class Projection:
    """The projection out = W·x + b + scale·B·(A·x) of each of C experts.

    Attributes:
        weights: returns all W [C, out, in] in the compute dtype, dequantized or cast again on each call; with
            `LowRank.is_merged`, W + scale·B·A rounded.
        bias: [C, out], or None.
        trained: the weight and bias modules of the C experts if they train in full, else empty.
        low_rank: LoRA factors, or None.
    """

    weights: Callable[[], Tensor]
    bias: Tensor | None
    trained: tuple[FullProjection, ...] = ()
    low_rank: LowRank | None = None

    @property
    def trains(self) -> bool:
        """Whether the projection has parameters: full weights or LoRA factors."""
        return bool(self.trained) or self.low_rank is not None

    def forward(
        self, x: Tensor, gemm: GroupedGemm, weights: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Project rows [N, in], sorted by expert, to [N, out].

        `weights` is the result of `self.weights()`, if the caller has it already. The result is written to `into`
        [N, out], if given, else to a new tensor, and returned.
        """
        return self._product(x, gemm, weights, into, backward=False)

    def grad_input(
        self, dout: Tensor, gemm: GroupedGemm, weights: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Return the gradient [N, in] of the input rows, from `dout` [N, out]; other arguments as in `forward`."""
        return self._product(dout, gemm, weights, into, backward=True)

    def _product(
        self, rows: Tensor, gemm: GroupedGemm, weights: Tensor | None, into: Tensor | None, *, backward: bool
    ) -> Tensor:
        """Return the product with W, or in `backward` with Wᵀ, plus the low-rank terms; in groups of several experts by
        one kernel, if it can join them."""
        bias = None if backward or self.bias is None else self.bias.to(rows.dtype)
        low_rank = self.low_rank
        if low_rank is not None and low_rank.is_joined and not low_rank.is_merged and gemm.ends is not None:
            matrices = self.weights() if weights is None else weights
            matrices = matrices if backward else matrices.mT
            out = rows.new_empty(rows.shape[0], matrices.shape[2]) if into is None else into
            low_rank.join(rows, matrices, out, gemm, backward=backward)
            return out if bias is None else out.add_(gemm.of_rows(bias, len(out)))
        # dequantized weights have no name here: they are freed before the low-rank terms are computed
        if backward:
            out = gemm.mm(rows, self.weights() if weights is None else weights)
        else:
            out = gemm.linear(rows, self.weights() if weights is None else weights, bias)
        if low_rank is None or low_rank.is_merged:
            return out if into is None else into.copy_(out)
        into = out if into is None else into
        low_rank.add(out, into, rows, gemm, backward=backward)
        return into

    def add_gradients(
        self, grads: Gradients, x: Tensor, dout: Tensor, gemm: GroupedGemm, weights: RowWeights | None = None
    ) -> None:
        """Write the gradients of this projection's parameters into `grads`.

        `x` [N, in] are the input rows, and `dout` [N, out] the gradients of the output rows, which are multiplied here
        by the routing weights, if given.
        """
        if self.trained:
            dout = dout if weights is None else dout * weights.column(dout.dtype)
            for full, of_weight in zip(self.trained, gemm.outer(dout, x), strict=True):
                grads[full.weight] = of_weight.to(full.weight.dtype)
            for full, rows in zip(self.trained, dout.split(gemm.counts), strict=True):
                if full.bias is not None:
                    grads[full.bias] = rows.sum(0).to(full.bias.dtype)
        if self.low_rank is not None:
            self.low_rank.add_gradients(grads, x, dout, gemm, weights)
