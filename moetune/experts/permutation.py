"""Token rows sorted by expert, group by group, and back to their tokens.

Shapes: T tokens, K experts a token, E experts, H model dim, C experts of a group, N their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moetune.experts.kernels import operators as kernels
from moetune.experts.kernels.grouped import GroupedGemm


@dataclass(frozen=True)
class RowGroup:
    """Experts in neighbouring slots and their rows: flat (token, choice) positions [N], at the place `at` among all."""

    slots: range
    gemm: GroupedGemm
    at: slice
    order: Tensor


@dataclass(frozen=True)
class Permutation:
    """Token rows sorted by the slot of their expert.

    Attributes:
        order: flat (token, choice) positions [T·K], sorted.
        counts: rows of each slot.
    """

    order: Tensor
    counts: list[int]
    top_k: int

    @classmethod
    def of(cls, slots_TK: Tensor, counts: list[int]) -> Permutation:
        """Sort the chosen slots, of which each occurs `counts` times."""
        return cls(sorted_positions(slots_TK.flatten(), len(counts)), counts, slots_TK.shape[-1])

    def groups(self, slots: Iterable[range]) -> Iterator[RowGroup]:
        """Yield the groups that receive a token."""
        groups = [group for group in slots if any(self.counts[group.start : group.stop])]
        ends = self._ends(groups)
        starts = [0, *accumulate(self.counts)]
        for group in groups:
            own = slice(group.start, group.stop)
            gemm = GroupedGemm(self.counts[own], None if len(group) == 1 or ends is None else ends[own])
            at = slice(starts[group.start], starts[group.stop])
            yield RowGroup(group, gemm, at, self.order[at])

    def _ends(self, groups: list[range]) -> Tensor | None:
        """[E] int32 on the device: where the rows of each expert end within its group; None if each is alone."""
        if all(len(slots) == 1 for slots in groups):
            return None
        ends = [0] * len(self.counts)
        for slots in groups:
            ends[slots.start : slots.stop] = accumulate(self.counts[slots.start : slots.stop])
        is_cuda = self.order.is_cuda
        return torch.tensor(ends, dtype=torch.int32, pin_memory=is_cuda).to(self.order.device, non_blocking=True)


def sorted_positions(numbers: Tensor, count: int) -> Tensor:
    """Positions of numbers below `count`, sorted by them. A GPU passes over narrow ones fewer times."""
    return torch.argsort(numbers.to(torch.uint8 if count <= 256 else torch.int32), stable=True)


class TokenRows:
    """Gather the tokens' rows of each group, and sum the experts' results for each token into `out_TH`.

    A single expert has at most one row of a token, so its results are added at once. In a larger group a token may have
    several rows, and a GPU adds those at equal indices in any order: then all T·K rows are gathered first, results
    replace them, and each token's rows are summed at the end.

    Args:
        x_TH: what is gathered.
        out_TH: None if only rows are gathered.
        weights: of each row in the sum [T·K]; None for 1.
    """

    def __init__(
        self,
        x_TH: Tensor,
        out_TH: Tensor | None,
        permutation: Permutation,
        groups: list[range],
        weights: Tensor | None = None,
    ) -> None:
        self.x_TH, self.out_TH, self.weights = x_TH, out_TH, weights
        order, self.top_k = permutation.order, permutation.top_k
        self.rows_SH: Tensor | None = None
        if out_TH is not None and self.top_k > 1 and any(len(slots) > 1 for slots in groups):
            self.inverse = order.new_empty(len(order), dtype=torch.int32)
            self.rows_SH = kernels.gather_rows(x_TH, order, self.top_k, self.inverse)
        elif out_TH is not None:
            out_TH.zero_()

    def of(self, group: RowGroup) -> Tensor:
        """Rows [N, H] of a group, valid until its results replace them."""
        if self.rows_SH is None:
            return kernels.gather_rows(self.x_TH, group.order, self.top_k, None)
        return self.rows_SH[group.at]

    def place(self, group: RowGroup) -> Tensor | None:
        """Where the results of a group are to be written; None for a tensor of their own."""
        return None if self.rows_SH is None else self.rows_SH[group.at]

    def add(self, group: RowGroup, results_NH: Tensor) -> None:
        """Add results that have no place, overwriting them."""
        if self.rows_SH is None:
            kernels.add_rows_(self.out_TH, results_NH, group.order, self.top_k, self.weights)

    def finish(self) -> None:
        if self.rows_SH is not None:
            kernels.sum_rows_(self.out_TH, self.rows_SH, self.inverse, self.weights)
