"""Sorting of token rows by expert, and summing the experts' results for each token.

Shapes: T tokens, K chosen experts per token, E experts, H hidden size; C experts in a group with N rows together. A
slot is an expert's position in the order in which the experts are computed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from moetune.kernels import operators as kernels
from moetune.kernels.grouped import GroupedGemm


@dataclass(frozen=True)
class RowGroup:
    """The experts of consecutive slots and the token rows that are routed to them.

    Attributes:
        counts: each slot's number of rows; empty if the host does not know them.
        at: slice of these rows among all T·K sorted rows; None if they are all of them.
        of_all, ends: `order` and `ends` of the layer's `Permutation`.
    """

    slots: range
    counts: list[int]
    at: slice | None
    of_all: Tensor
    ends: Tensor | None

    @cached_property
    def order(self) -> Tensor:
        """[N] flat positions token·K + choice of the rows, sorted by slot."""
        return self.of_all if self.at is None else self.of_all[self.at]

    @cached_property
    def gemm(self) -> GroupedGemm:
        """The grouped product over the N rows."""
        if self.at is None:
            return GroupedGemm([], self.ends)
        if len(self.slots) == 1 or self.ends is None:
            return GroupedGemm(self.counts, None)
        return GroupedGemm(self.counts, self.ends[self.slots.start : self.slots.stop])


@dataclass(frozen=True)
class Permutation:
    """The T·K token rows of a layer, sorted by the slot of their expert (stable).

    Attributes:
        order: [T·K] int64, the rows' flat positions token·K + choice in sorted order.
        counts: each slot's number of rows; None if the host does not know them, and all slots are one group.
        top_k: K.
        ends: [E] int32, where the rows of each slot end in `order`; None if `counts` is not.
    """

    order: Tensor
    counts: list[int] | None
    top_k: int
    ends: Tensor | None = None

    def groups(self, slots: Iterable[range]) -> Iterator[RowGroup]:
        """Yield a `RowGroup` for each range of slots that has at least one row."""
        groups = [group for group in slots if self.has_rows(group)]
        if (counts := self.counts) is None:
            yield from (RowGroup(group, [], None, self.order, self.ends) for group in groups)
            return
        ends = self._ends(counts, groups)
        starts = [0, *accumulate(counts)]
        for group in groups:
            at = slice(starts[group.start], starts[group.stop])
            yield RowGroup(group, counts[group.start : group.stop], at, self.order, ends)

    def has_rows(self, slots: range) -> bool:
        """Return whether a group of slots has at least one row."""
        return self.order.shape[0] > 0 if self.counts is None else any(self.counts[slots.start : slots.stop])

    def _ends(self, counts: list[int], groups: list[range]) -> Tensor | None:
        """Return where each slot's rows end, counted from the start of its group: [E] int32 on the device of `order`.

        None if every group has one expert.
        """
        if all(len(slots) == 1 for slots in groups):
            return None
        ends = [0] * len(counts)
        for slots in groups:
            ends[slots.start : slots.stop] = accumulate(counts[slots.start : slots.stop])
        is_cuda = self.order.is_cuda
        return torch.tensor(ends, dtype=torch.int32, pin_memory=is_cuda).to(self.order.device, non_blocking=True)


class TokenRows:
    """Gather the token rows of each group, and sum the experts' results of each token into `out_TH`.

    For each group, take its rows from `of`, write the results to `place` or pass them to `add`; then call `finish`
    once. A single expert has at most one row of a token, so its results are added to `out_TH` at once. In a group of
    several experts a token may have several rows, and a GPU adds rows at equal indices in any order. If there is such a
    group, all T·K rows are gathered first, results replace them, and `finish` sums the rows of each token in a fixed
    order.

    `out_TH` is overwritten; if it is None, rows of `x_TH` [T, H] are only gathered. `weights` [T·K] are the weights of
    the rows in the sum, by flat position; None for 1.
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
            self.inverse = order.new_empty(order.shape[0], dtype=torch.int32)
            self.rows_SH = kernels.gather_rows(x_TH, order, self.top_k, self.inverse)
        elif out_TH is not None:
            out_TH.zero_()

    def of(self, group: RowGroup) -> Tensor:
        """Return the rows [N, H] of a group's tokens: a new tensor, or the view that its results will overwrite."""
        if self.rows_SH is not None:
            return self.rows_SH if group.at is None else self.rows_SH[group.at]
        rows_NH: Tensor = kernels.gather_rows(self.x_TH, group.order, self.top_k, None)
        return rows_NH

    def place(self, group: RowGroup) -> Tensor | None:
        """Return the view [N, H] to write a group's results to; None if they are to be passed to `add`."""
        return None if self.rows_SH is None else self.of(group)

    def add(self, group: RowGroup, results_NH: Tensor) -> None:
        """Add a group's results [N, H], times their weights, to `out_TH`; does nothing if they were written to `place`.

        `results_NH` is overwritten.
        """
        if self.rows_SH is None:
            kernels.add_rows_(self.out_TH, results_NH, group.order, self.top_k, self.weights)

    def finish(self) -> None:
        """Complete the sums in `out_TH`: sum the results that were written to `place`, if any."""
        if self.rows_SH is not None:
            kernels.sum_rows_(self.out_TH, self.rows_SH, self.inverse, self.weights)
