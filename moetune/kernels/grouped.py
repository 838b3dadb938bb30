"""Grouped matrix products: rows sorted by expert, times each expert's own matrix.

Shapes: C experts in a group with N rows together; p and q features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moetune.compat.torch import is_observed
from moetune.kernels.registry import OPERATORS, Operator, on_gpu, without_kernel


@dataclass(frozen=True)
class GroupedGemm:
    """Products of N rows, sorted by expert, with one matrix for each of C experts.

    `counts` holds each expert's number of rows, and `ends` [C] int32, on the rows' device, the cumulative sums of
    `counts`; None if C is 1. `counts` is empty where the host does not know them (`reads_ends`).
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
        return out_Nq if bias_Cq is None else out_Nq.add_(self.of_rows(bias_Cq, len(x_Np)))

    def dot(self, x_Nq: Tensor, bias_Cq: Tensor) -> Tensor:
        """Return the dot product of each row with its expert's vector [q]: [N]."""
        if self.ends is None:
            return x_Nq @ bias_Cq[0]
        return torch.einsum("nq,nq->n", x_Nq, self.of_rows(bias_Cq, len(x_Nq)))

    def of_rows(self, vectors_Cq: Tensor, rows: int) -> Tensor:
        """Return each row's copy of its expert's vector, for all N = `rows`: [N, q]."""
        assert self.ends is not None
        numbers_N = torch.arange(rows, dtype=torch.int32, device=self.ends.device)
        return vectors_Cq.index_select(0, torch.searchsorted(self.ends, numbers_N, right=True, out_int32=True))


# torch's own operator has a fake kernel only in bfloat16. Where torch computes it as a loop, the host waits for `ends`;
# the loop and Triton's kernel use `counts`, which are on the host already.
library = torch.library.Library("moetune", "FRAGMENT")
library.define("grouped_mm(Tensor a, Tensor b, Tensor ends, int[] counts) -> Tensor")


def product_of_groups(a: Tensor, b: Tensor, ends: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Return grouped products: a [N, p] · b [C, p, q] -> [N, q], or a [p, N] · b [N, q] -> [C, p, q].

    The number of dimensions of `b` selects the product; `ends` and `counts` are as in `GroupedGemm`.
    """
    if ends is None:
        return a @ b[0] if b.dim() == 3 else (a @ b)[None]
    is_seen = is_observed(a) and "grouped_mm" not in without_kernel()  # as in operators.py
    return (torch.ops.moetune.grouped_mm.default if is_seen else _run)(a, b, ends, counts)


def _loop(a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute `product_of_groups` with one torch product per expert; without `counts` the host waits for `ends`."""
    out = _empty(a, b, ends, counts)
    counts = counts or ends.diff(prepend=ends.new_zeros(1)).tolist()
    if b.dim() == 3:
        for rows, matrix, product in zip(a.split(counts), b.unbind(), out.split(counts), strict=True):
            torch.mm(rows, matrix, out=product)
    else:
        for left, right, product in zip(a.split(counts, 1), b.split(counts), out.unbind(), strict=True):
            torch.mm(left, right, out=product)
    return out


def _by_torch(a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute `product_of_groups` with torch's operator, which on a CPU is the loop in C++."""
    return grouped_mm(a, b, offs=ends)


def _empty(a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor in the shape of the product; also the operator's fake kernel."""
    return a.new_empty((a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(ends), a.shape[0], b.shape[-1]))


def kernel_of(capability: tuple[int, int], a: Tensor, b: Tensor) -> Literal["torch", "triton"] | None:
    """Return whose kernel multiplies all groups at once, "torch" or "triton"; None to multiply expert by expert.

    `a` and `b` are the operands of `product_of_groups`. On compute capability 9.x it is torch's, for bfloat16 with rows
    aligned to 16 bytes. On 8.x and 12.x torch has none, and on 10.x its kernel is wrong for groups without rows
    (pytorch/pytorch#172439, #193633); there it is Triton's, in 16 bits only: in float32, which has no tensor cores,
    cuBLAS's products are faster.
    """
    if capability[0] == 9:
        return "torch" if a.dtype == torch.bfloat16 and _is_aligned(a, b) else None
    return "triton" if is_in_triton(capability, a.dtype) else None


def is_in_triton(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """Return whether Triton's kernel computes grouped products in a dtype on a GPU of this compute capability."""
    return capability[0] >= 8 and capability[0] != 9 and dtype in (torch.bfloat16, torch.float16)


def reads_ends(capability: tuple[int, int], dtype: torch.dtype, *features: int) -> bool:
    """Return whether a kernel finds the rows of each expert on the GPU itself, so that the host need not know `counts`.

    `features` are those of all operands and products, whose rows are contiguous. None of the kernels may be left out
    (`without_kernel`).
    """
    by_torch = capability[0] == 9 and dtype == torch.bfloat16 and all(size % 8 == 0 for size in features)
    return (by_torch or is_in_triton(capability, dtype)) and not without_kernel()


def _is_aligned(a: Tensor, b: Tensor) -> bool:
    """Return whether the rows of both operands and of the product are aligned to 16 bytes."""
    per_16 = 16 // b.itemsize
    layouts = ((sorted(matrix.stride()[-2:]), matrix.storage_offset()) for matrix in (a, b))
    return b.shape[-1] % per_16 == 0 and all(
        short == 1 and long % per_16 == 0 and offset % per_16 == 0 for (short, long), offset in layouts
    )


_capability = cache(torch.cuda.get_device_capability)
_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)


def _kernel(a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Callable[..., Tensor] | None:
    if not a.is_cuda:
        return _by_torch if a.dtype in _ON_CPU and _is_aligned(a, b) else None
    whose = kernel_of(_capability(a.device), a, b)
    if whose == "torch":
        return _by_torch
    module = on_gpu("moetune.kernels.triton_product") if whose == "triton" else None
    return None if module is None else module.grouped_mm


_run = OPERATORS["grouped_mm"] = Operator("grouped_mm", _loop, _kernel)
library.impl("grouped_mm", _run, "CompositeExplicitAutograd")
torch.library.register_fake("moetune::grouped_mm", _empty, lib=library)
