"""The order of experts in a stacked matrix, by its numbers where names are silent.

Three signs, each of which favours one order of B over the other ([out, r, E] or [out, E, r]):

- All experts share B (`adapt.lora.share: outer`): in the wrong order they do not have the same.
- Whole experts are zero. Experts that no token reached, or that have no factors, have B = 0 in all of their ranks. In
  the wrong order their zeros are spread over all experts.
- Experts were trained unequally, so the norms of B's columns differ between experts more than within one. The F
  statistic of an analysis of variance of their logarithms, experts as groups, is about 1 without such a difference.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from torch import Tensor

from moetune.adapters.stacked import Order

RowOrder = Literal["grouped", "interleaved"]
"""`grouped`: the expert is the slowest index of the columns; `interleaved`: the fastest, as in PEFT."""
_CLEAR, _LIKELIER, _GROUPS = 4.0, 10.0, 15
"""The second sign counts with at least 15 degrees of freedom between experts, from F = 4 (chance: 1 ± 0.4), and where
the order is e¹⁰ times as likely as the other: n/2 times the logarithm of the ratio of the squares within experts."""


_ORDERS: dict[RowOrder, Order] = {"grouped": Order(True, False), "interleaved": Order(False, False)}


class Sign(NamedTuple):
    """The order of the experts that the factors' values favour (`verdict`), and why, as text (`because`)."""

    verdict: RowOrder
    because: str


def sign_of(stacks: Iterable[tuple[Tensor, Tensor, int]]) -> Sign | None:
    """Return the order that the numbers favour; None if they favour none, or if both orders read the same.

    Args:
        stacks: for each layer and projection, the two stored matrices [E·r, …] and […, r·E], and E.
    """
    whole, torn, shared = (dict.fromkeys(_ORDERS, 0) for _ in range(3))
    logs: dict[RowOrder, list[Tensor]] = {name: [] for name in _ORDERS}
    for first, second, experts in stacks:
        if experts == 1 or len(first) == experts:
            continue
        alike = [name for name, order in _ORDERS.items() if _is_shared(order.read(first, second, experts)[1])]
        if len(alike) == 1:
            shared[alike[0]] += 1
            continue
        for name, order in _ORDERS.items():
            A, B = order.read(first, second, experts)
            norms = B.float().norm(dim=1)  # [E, r], of the columns of the second matrix
            dead, no_rows = norms == 0, A.float().norm(dim=2) == 0
            whole[name] += int(dead.all(1).sum())
            torn[name] += int((~dead.all(1) & (dead != no_rows).any(1)).sum())
            if norms.all():  # zero has no logarithm
                logs[name].append(norms.double().log())
    for name, other_name in itertools.permutations(_ORDERS):
        if shared[name] and not shared[other_name]:
            return Sign(name, "all experts have the same in this order only")
        if whole[name] and not torn[name] and torn[other_name]:
            return Sign(name, f"{whole[name]} experts of a layer are zero as a whole in this order only")
    if sum(len(norms) - 1 for norms in logs["grouped"]) < _GROUPS:
        return None
    spread = {name: _Spread.of(own) for name, own in logs.items()}
    best, worse = sorted(_ORDERS, key=lambda name: -spread[name].statistic)
    if spread[best].statistic < _CLEAR or spread[best].likelier(spread[worse]) < _LIKELIER:
        return None
    return Sign(
        best,
        f"in this order the sizes of its columns differ between experts more than in the other (F = "
        f"{spread[best].statistic:.1f} and {spread[worse].statistic:.1f})",
    )


def _is_shared(factors: Tensor) -> bool:
    """Return whether the factors [E, …] of all experts that have any are the same, and of more than one."""
    own = factors[factors.flatten(1).any(1)]
    return len(own) > 1 and own.equal(own[:1].expand_as(own))


class _Spread(NamedTuple):
    """Analysis of variance of the logarithms of column norms, experts as groups.

    Attributes:
        statistic: F, the mean square between experts over that within; 0 if it is undefined.
        within: the sum of squares within experts.
        freedom: degrees of freedom.
    """

    statistic: float
    within: float
    freedom: int

    @classmethod
    def of(cls, logs: list[Tensor]) -> "_Spread":
        """Analyse logarithms of norms: [E, r] for each matrix."""
        means = [own.mean(1, keepdim=True) for own in logs]
        pairs = list(zip(logs, means, strict=True))
        between = sum(float(own.shape[1] * (mean - own.mean()).square().sum()) for own, mean in pairs)
        within = sum(float((own - mean).square().sum()) for own, mean in pairs)
        of_experts, of_ranks = sum(len(own) - 1 for own in logs), sum(own.numel() - len(own) for own in logs)
        statistic = between / of_experts * of_ranks / within if of_experts and of_ranks and within else 0.0
        return cls(statistic, within, of_experts + of_ranks)

    def likelier(self, other: "_Spread") -> float:
        """Return the logarithm of how many times as likely this order of the columns is as that of `other`.

        It is n/2 times the logarithm of the ratio of the squares within experts; 0 if these are zero here.
        """
        return self.freedom / 2 * math.log(other.within / self.within) if self.within else 0.0
