"""Which tokens go to which experts, as rows: sorted by expert, in groups of neighbours, and back to their tokens.

Shapes: T tokens, K experts a token, E experts, H model dim, C experts of a group, N their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moetune.experts.kernels import operators as kernels
from moetune.experts.kernels.grouped import Rows


@dataclass(frozen=True)
class Routing:
    """Token rows grouped by the turn of their expert: `order` lists flat (token, choice) positions, `counts` how many
    go to each."""

    order: Tensor
    counts: list[int]
    top_k: int

    @classmethod
    def of(cls, slots_TK: Tensor, counts: list[int]) -> Routing:
        """Of the experts that are chosen, by their turns, each `counts` times."""
        return cls(sorted_positions(slots_TK.flatten(), len(counts)), counts, slots_TK.shape[-1])

    def groups(self, turns: Iterable[range]) -> Iterator[Group]:
        """Those that receive a token."""
        groups = [group for group in turns if any(self.counts[group.start : group.stop])]
        ends = self._ends(groups)
        starts = [0, *accumulate(self.counts)]
        for group in groups:
            own = slice(group.start, group.stop)
            rows = Rows(self.counts[own], None if len(group) == 1 or ends is None else ends[own])
            at = slice(starts[group.start], starts[group.stop])
            yield Group(group, rows, at, self.order[at])

    def _ends(self, groups: list[range]) -> Tensor | None:
        """[E] int32 on the device: where the rows of each expert end among its group's; None if each is alone."""
        if all(len(turns) == 1 for turns in groups):
            return None
        ends = [0] * len(self.counts)
        for turns in groups:
            ends[turns.start : turns.stop] = accumulate(self.counts[turns.start : turns.stop])
        is_cuda = self.order.is_cuda
        return torch.tensor(ends, dtype=torch.int32, pin_memory=is_cuda).to(self.order.device, non_blocking=True)


def sorted_positions(numbers: Tensor, count: int) -> Tensor:
    """The places of numbers below `count`, sorted by them. A GPU passes over narrow ones fewer times."""
    return torch.argsort(numbers.to(torch.uint8 if count <= 256 else torch.int32), stable=True)


@dataclass(frozen=True)
class Group:
    """Neighbouring experts and what they receive: flat positions [N], which lie `at` this place among all."""

    turns: range
    rows: Rows
    at: slice
    order: Tensor


class TokenRows:
    """Rows of tokens [T, H] on their way through the experts, group by group, and back to their tokens, into `out`.

    An expert has one row of a token at most, and alone its rows are added at once. In a larger group a token may have
    several, and a GPU adds those at equal indices in any order: there all T·K rows are gathered at once, results take
    their places, and each token's are summed in the end. Each may be weighted, by its share of `weights` [T·K].
    """

    def __init__(
        self, x_TH: Tensor, out_TH: Tensor | None, routing: Routing, groups: list[range], weights: Tensor | None = None
    ) -> None:
        self.x_TH, self.out_TH, self.weights, self.order, self.top_k = (
            x_TH,
            out_TH,
            weights,
            routing.order,
            routing.top_k,
        )
        waits = out_TH is not None and self.top_k > 1 and any(len(turns) > 1 for turns in groups)
        self.rows_SH: Tensor | None = None
        if waits:
            self.inverse = self.order.new_empty(len(self.order), dtype=torch.int32)
            self.rows_SH = kernels.gather_rows(x_TH, self.order, self.top_k, self.inverse)
        elif out_TH is not None:
            out_TH.zero_()

    def of(self, group: Group) -> Tensor:
        """Its rows [N, H]; they last until its results take their place."""
        if self.rows_SH is None:
            return kernels.gather_rows(self.x_TH, group.order, self.top_k, None)
        return self.rows_SH[group.at]

    def place(self, group: Group) -> Tensor | None:
        """Where its results wait; None where they are added."""
        return None if self.rows_SH is None else self.rows_SH[group.at]

    def add(self, group: Group, results_NH: Tensor) -> None:
        """Uses the results up, or they are in their place already."""
        if self.rows_SH is None:
            kernels.add_rows_(self.out_TH, results_NH, group.order, self.top_k, self.weights)

    def finish(self) -> None:
        if self.rows_SH is not None:
            kernels.sum_rows_(self.out_TH, self.rows_SH, self.inverse, self.weights)
