"""In which order a stacked matrix holds its experts: what the numbers say, where names and shapes are silent.

Two signs, each of which favours one order of B over the other ([out, r, E] or [out, E, r]):

- Whole experts are zero. Experts that no token reached, or that have no factors, have B = 0 in all of their ranks. In
  the wrong order their zeros are spread over all experts.
- Experts were trained unequally, so the norms of B's columns differ between experts more than within one. The F
  statistic of an analysis of variance of their logarithms, experts as groups, is about 1 without such a difference.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from moetune.adapters.stacked import Order

RowOrder = Literal["grouped", "interleaved"]
"""`grouped`: the expert is the slowest index of the columns; `interleaved`: the fastest, as in PEFT."""
_CLEAR, _LIKELIER, _GROUPS = 4.0, 10.0, 15
"""The second sign counts with at least 15 degrees of freedom between experts, from F = 4 (chance: 1 ± 0.4), and where
the order is e¹⁰ times as likely as the other: n/2 times the logarithm of the ratio of the squares within experts."""


@dataclass(frozen=True)
class Sign:
    """The order of the experts that the factors' values favour (`verdict`), and why, as text (`because`)."""

    verdict: RowOrder
    because: str


def sign_of(stacks: Iterable[tuple[Tensor, Tensor, int]]) -> Sign | None:
    """Return the order that the numbers favour; None if they favour none, or if both orders read the same.

    Args:
        stacks: for each layer and projection, the two stored matrices [E·r, …] and […, r·E], and E.
    """
    orders: dict[RowOrder, bool] = {"grouped": True, "interleaved": False}
    whole, torn = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    spread = {verdict: _Spread() for verdict in orders}
    for first, second, experts in stacks:
        if experts == 1 or len(first) == experts:
            continue
        for name, is_grouped in orders.items():
            one, other = Order(is_grouped, is_swapped=False).read(first, second, experts)
            norms = other.float().norm(dim=1)  # [E, r], of the columns of the second matrix
            dead, no_rows = norms == 0, one.float().norm(dim=2) == 0
            whole[name] += int(dead.all(1).sum())
            torn[name] += int((~dead.all(1) & (dead != no_rows).any(1)).sum())
            spread[name].add(norms.double())
    if whole["grouped"] and not torn["grouped"] and torn["interleaved"]:
        return Sign("grouped", f"{whole['grouped']} experts of a layer are zero as a whole in this order only")
    if whole["interleaved"] and not torn["interleaved"] and torn["grouped"]:
        return Sign("interleaved", f"{whole['interleaved']} experts of a layer are zero as a whole in this order only")
    if spread["grouped"].between < _GROUPS:
        return None
    by_order = {verdict: one.statistic() for verdict, one in spread.items()}
    best, worse = sorted(by_order, key=lambda verdict: -by_order[verdict])
    if by_order[best] < _CLEAR or spread[best].likelier(spread[worse]) < _LIKELIER:
        return None
    return Sign(
        best,
        f"in this order the sizes of its columns differ between experts more than in the other (F = "
        f"{by_order[best]:.1f} and {by_order[worse]:.1f})",
    )


class _Spread:
    """Analysis of variance of the logarithms of column norms, experts as groups: call `add` for each matrix, then the
    other methods. Sums of squares and degrees of freedom are between experts and within them."""

    def __init__(self) -> None:
        self.squares_between = self.squares_within = 0.0
        self.between = self.within = 0

    def add(self, norms: Tensor) -> None:
        """Add the norms [E, r] of a matrix's columns; does nothing if one is zero, which has no logarithm."""
        if not norms.all():
            return
        logs = norms.log()
        means = logs.mean(1, keepdim=True)
        experts, rank = norms.shape
        self.squares_between += float(rank * (means - logs.mean()).square().sum())
        self.squares_within += float((logs - means).square().sum())
        self.between += experts - 1
        self.within += experts * (rank - 1)

    def likelier(self, other: "_Spread") -> float:
        """Return the logarithm of how many times as likely this order of the columns is as that of `other`.

        It is n/2 times the logarithm of the ratio of the squares within experts; 0 if these are zero here.
        """
        count = self.between + self.within
        return count / 2 * math.log(other.squares_within / self.squares_within) if self.squares_within else 0.0

    def statistic(self) -> float:
        """Return F, the mean square between experts over that within; 0 if it is undefined."""
        if not self.between or not self.within or not self.squares_within:
            return 0.0
        return (self.squares_between / self.between) / (self.squares_within / self.within)
