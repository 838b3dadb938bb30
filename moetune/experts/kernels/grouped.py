"""Grouped matrix products: rows sorted by expert, each expert's rows times the expert's own matrix.

Shapes: C experts in a group with N rows together; p and q features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


@dataclass(frozen=True)
class GroupedGemm:
    """Products of N rows, sorted by expert, with one matrix for each of C experts.

    Attributes:
        counts: number of rows of each expert; the sum is N.
        ends: [C] int32 on the rows' device, the end of each expert's rows; None for one expert.
    """

    counts: list[int]
    ends: Tensor | None = None

    def mm(self, a_Np: Tensor, b_Cpq: Tensor) -> Tensor:
        """Return each expert's rows [N, p] times the expert's matrix [p, q]: a new tensor [N, q]."""
        return product_of_groups(a_Np, b_Cpq, self.ends, self.counts)

    def outer(self, a_Np: Tensor, b_Nq: Tensor) -> Tensor:
        """Return aᵀ·b over each expert's rows: a new tensor [C, p, q], zeros for an expert without rows."""
        return product_of_groups(a_Np.T, b_Nq, self.ends, self.counts)

    def linear(self, x_Np: Tensor, weights_Cqp: Tensor, bias_Cq: Tensor | None) -> Tensor:
        """Return W·x + b for each row with its expert's W [q, p] and b [q]: a new tensor [N, q]."""
        if self.ends is None:
            return torch.nn.functional.linear(x_Np, weights_Cqp[0], None if bias_Cq is None else bias_Cq[0])
        out_Nq = self.mm(x_Np, weights_Cqp.mT)
        return out_Nq if bias_Cq is None else out_Nq.add_(self._of_rows(bias_Cq))

    def dot(self, x_Nq: Tensor, bias_Cq: Tensor) -> Tensor:
        """Return the dot product of each row with its expert's vector [q]: [N]."""
        if self.ends is None:
            return x_Nq @ bias_Cq[0]
        return torch.einsum("nq,nq->n", x_Nq, self._of_rows(bias_Cq))

    def _of_rows(self, vectors_Cq: Tensor) -> Tensor:
        """Return each row's copy of its expert's vector: [N, q]."""
        assert self.ends is not None
        numbers_N = torch.arange(sum(self.counts), dtype=torch.int32, device=self.ends.device)
        return vectors_Cq.index_select(0, torch.searchsorted(self.ends, numbers_N, right=True, out_int32=True))


# torch's own operator has a fake kernel only in bfloat16. Where torch computes it as a loop, the host waits for `ends`;
# the loop below uses `counts`, which are on the host already.
library = torch.library.Library("moetune", "FRAGMENT")
library.define("grouped_mm(Tensor a, Tensor b, Tensor ends, int[] counts) -> Tensor")


def product_of_groups(a: Tensor, b: Tensor, ends: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Return grouped products: a [N, p] · b [C, p, q] -> [N, q], or a [p, N] · b [N, q] -> [C, p, q].

    Args:
        a: left rows, or transposed left rows.
        b: one matrix for each expert, or rows; its number of dimensions selects the product.
        ends: [C] int32, the end of each expert's rows; None if there is only one expert.
        counts: number of rows of each expert.
    """
    if ends is not None:
        return torch.ops.moetune.grouped_mm(a, b, ends, counts)
    return a @ b[0] if b.dim() == 3 else (a @ b)[None]


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute `product_of_groups` with torch's grouped kernel where there is one, else in a loop over the experts."""
    if a.is_cuda:
        as_one = runs_as_one(torch.cuda.get_device_capability(a.device), a, b)
    else:  # torch's CPU operator is the loop below, in C++
        as_one = a.dtype in _ON_CPU and _is_aligned(a, b)
    if as_one:
        return grouped_mm(a, b, offs=ends)
    out = _empty(a, b, ends, counts)
    if b.dim() == 3:
        for rows, matrix, product in zip(a.split(counts), b.unbind(), out.split(counts), strict=True):
            torch.mm(rows, matrix, out=product)
    else:
        for left, right, product in zip(a.split(counts, 1), b.split(counts), out.unbind(), strict=True):
            torch.mm(left, right, out=product)
    return out


def _empty(a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor in the shape of the product; also the operator's fake kernel."""
    return a.new_empty((a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(counts), a.shape[0], b.shape[-1]))


def runs_as_one(capability: tuple[int, int], a: Tensor, b: Tensor) -> bool:
    """Return whether torch multiplies all groups with one kernel on a GPU.

    True for bfloat16 with rows aligned to 16 bytes on compute capability 9.x. torch's kernel for 10.x is not used: it
    is wrong for groups without rows (pytorch/pytorch#172439, #193633).

    Args:
        capability: compute capability (major, minor) of the GPU.
        a: left operand, as in `product_of_groups`.
        b: right operand.
    """
    return a.dtype == torch.bfloat16 and capability[0] == 9 and _is_aligned(a, b)


def _is_aligned(a: Tensor, b: Tensor) -> bool:
    """Return whether the rows of both operands and of the product are aligned to 16 bytes."""
    per_16 = 16 // b.itemsize
    layouts = ((sorted(matrix.stride()[-2:]), matrix.storage_offset()) for matrix in (a, b))
    return b.shape[-1] % per_16 == 0 and all(
        short == 1 and long % per_16 == 0 and offset % per_16 == 0 for (short, long), offset in layouts
    )


_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)
library.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
torch.library.register_fake("moetune::grouped_mm", _empty, lib=library)
