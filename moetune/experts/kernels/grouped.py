"""Products of several experts at once: rows that are sorted by expert, each expert's times a matrix of its own.

Shapes: C experts of a group, N their rows together, p and q features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


@dataclass(frozen=True)
class GroupedGemm:
    """Products of N rows, sorted by expert, with a matrix of each of C experts.

    Attributes:
        counts: rows of each expert.
        ends: [C] int32, where the rows of each expert end; not needed for one expert.
    """

    counts: list[int]
    ends: Tensor | None = None

    def mm(self, a_Np: Tensor, b_Cpq: Tensor) -> Tensor:
        """Each expert's rows times its matrix: [N, q], a fresh tensor."""
        return product_of_groups(a_Np, b_Cpq, self.ends, self.counts)

    def outer(self, a_Np: Tensor, b_Nq: Tensor) -> Tensor:
        """Of each expert aᵀ·b over its rows: [C, p, q], zeros for one without rows."""
        return product_of_groups(a_Np.T, b_Nq, self.ends, self.counts)

    def linear(self, x_Np: Tensor, weights_Cqp: Tensor, bias_Cq: Tensor | None) -> Tensor:
        """W·x + b of each expert: [N, q]."""
        if self.ends is None:
            return torch.nn.functional.linear(x_Np, weights_Cqp[0], None if bias_Cq is None else bias_Cq[0])
        out_Nq = self.mm(x_Np, weights_Cqp.mT)
        return out_Nq if bias_Cq is None else out_Nq.add_(self._of_rows(bias_Cq))

    def dot(self, x_Nq: Tensor, bias_Cq: Tensor) -> Tensor:
        """Each row times its expert's vector: [N]."""
        if self.ends is None:
            return x_Nq @ bias_Cq[0]
        return torch.einsum("nq,nq->n", x_Nq, self._of_rows(bias_Cq))

    def _of_rows(self, vectors_Cq: Tensor) -> Tensor:
        """Each row's expert's vector: [N, q]."""
        assert self.ends is not None
        numbers_N = torch.arange(sum(self.counts), dtype=torch.int32, device=self.ends.device)
        return vectors_Cq.index_select(0, torch.searchsorted(self.ends, numbers_N, right=True, out_int32=True))


# torch's own operator has no kernel for fake tensors but in bfloat16, and where it runs as a loop the host waits for
# the ends, which are known here.
library = torch.library.Library("moetune", "FRAGMENT")
library.define("grouped_mm(Tensor a, Tensor b, Tensor ends, int[] counts) -> Tensor")


def product_of_groups(a: Tensor, b: Tensor, ends: Tensor | None, counts: Sequence[int]) -> Tensor:
    """a [N, p] times b [C, p, q] is [N, q]; a [p, N] times b [N, q] is [C, p, q]. Without ends there is one expert."""
    if ends is not None:
        return torch.ops.moetune.grouped_mm(a, b, ends, counts)
    return a @ b[0] if b.dim() == 3 else (a @ b)[None]


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """a [N, p] times b [C, p, q] is [N, q]; a [p, N] times b [N, q] is [C, p, q]."""
    if a.is_cuda:
        as_one = runs_as_one(torch.cuda.get_device_capability(a.device), a, b)
    else:  # torch's is the loop below, in C++
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
    return a.new_empty((a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(counts), a.shape[0], b.shape[-1]))


def runs_as_one(capability: tuple[int, int], a: Tensor, b: Tensor) -> bool:
    """Whether such a card has a kernel for all groups together, which takes bfloat16 whose rows begin at 16 bytes."""
    return a.dtype == torch.bfloat16 and capability[0] in (9, 10) and _is_aligned(a, b)


def _is_aligned(a: Tensor, b: Tensor) -> bool:
    """Whether rows begin at 16 bytes, those of the product too."""
    per_16 = 16 // b.itemsize
    layouts = ((sorted(matrix.stride()[-2:]), matrix.storage_offset()) for matrix in (a, b))
    return b.shape[-1] % per_16 == 0 and all(
        short == 1 and long % per_16 == 0 and offset % per_16 == 0 for (short, long), offset in layouts
    )


_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)
library.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
torch.library.register_fake("moetune::grouped_mm", _empty, lib=library)
