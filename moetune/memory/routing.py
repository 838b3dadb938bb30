"""How many tokens each expert receives: the one thing about a step that a prediction has to assume.

Shapes: T tokens, K experts a token, E experts; a layer's experts receive T·K rows in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moetune.errors import UserError
from moetune.experts.context import CountRows
from moetune.files import expanded
from moetune.run.records import read_load


@dataclass(frozen=True)
class Routing:
    """An assumption. `fullest` is the load of the fullest expert as a multiple of the mean, where one holds for all
    layers; `load`, by layer, is each expert's share of that layer's rows."""

    name: str
    fullest: float | None = 1.0
    load: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def rows(self, layer: int, tokens: int, top_k: int, num_experts: int) -> list[int]:
        """Rows of each expert of one layer: E ints that sum to T·K, none above T.

        The fullest experts are the last ones: a layer's gradients pile up expert by expert, so that is the worst order.
        Under `worst` all others receive a row, if there are any left, because then they have gradients too.

        Raises:
            UserError: the recorded load has no such layer, or another number of experts.
        """
        if not self.load:
            return _rows(self.fullest, tokens, top_k, num_experts)
        shares = dict(self.load).get(layer)
        if shares is None or len(shares) != num_experts:
            found = "nothing" if shares is None else f"{len(shares)} experts"
            raise UserError(f"--routing {self.name!r}: has {found} for layer {layer}, which has {num_experts} experts")
        return _capped(tokens * top_k, tokens, shares)

    def count_rows(self, layer: int, ids: Tensor, num_experts: int) -> list[int]:
        """What a bank is told in place of what the ids say (`ExpertHooks.count_rows`)."""
        return self.rows(layer, ids.numel() // ids.shape[-1], ids.shape[-1], num_experts)


BALANCED = Routing("balanced")
_MOST_SKEW = 1_000_000


@dataclass(frozen=True)
class Replayed(Routing):
    """What the experts of real steps received, call by call.

    Attributes:
        steps: how many steps those are, with all their micro-steps.
        calls: the rows of each expert, in the order in which the banks asked.
    """

    steps: int = 0
    calls: tuple[tuple[int, ...], ...] = ()

    def answers(self) -> CountRows:
        """What answers in place of `ExpertHooks.count_rows`, from the first call on."""
        left = iter(self.calls)
        return lambda layer, ids, num_experts: list(next(left))


def parse_routing(text: str) -> Routing:
    """`balanced`, `skew:S` (the fullest expert receives S times the mean), `worst` (nearly all tokens choose the same
    experts), or a JSON file with `{"expert_load": {"<layer>": [tokens of expert 0, ...]}}`, as `train` leaves in
    `memory.json`.

    Raises:
        UserError: it is none of these.
    """
    if text in ("balanced", "worst"):
        return Routing(text, 1.0 if text == "balanced" else None)
    if text.startswith("skew:"):
        try:
            skew = float(text.removeprefix("skew:"))
        except ValueError:
            skew = 0.0
        if not 1 <= skew <= _MOST_SKEW:
            raise UserError(
                f"--routing {text!r}: the fullest expert's load over the mean is a number from 1 up to {_MOST_SKEW:,}; "
                "worst is the most there can be"
            )
        return Routing(text, skew)
    if not expanded(text).is_file():
        raise UserError(f"--routing {text!r}: is not balanced, skew:S, worst, or a file")
    return Routing(text, None, tuple(read_load(expanded(text), "--routing").items()))


def _rows(fullest: float | None, tokens: int, top_k: int, num_experts: int) -> list[int]:
    """The last experts as full as assumed, K of them if they can hold all rows; the others share the rest."""
    total = tokens * top_k
    most = tokens if fullest is None else min(tokens, -int(-min(fullest, num_experts) * total // num_experts))
    if fullest is None:
        rows = [tokens]
        for others in reversed(range(num_experts - 1)):  # each of them is to have a row still
            left = total - sum(rows)
            rows.append(min(tokens, max(left - others, min(left, 1))))
        return rows[::-1]
    rest = _split(total - most, [1 / (num_experts - 1)] * (num_experts - 1)) if num_experts > 1 else []
    return [*rest, most]


def _capped(total: int, most: int, shares: tuple[float, ...]) -> list[int]:
    """As `_split`, but no expert gets more than a row of each token: what it cannot take, the others share."""
    full: set[int] = set()
    while True:
        left = sum(share for expert, share in enumerate(shares) if expert not in full)
        open_ = [0.0 if expert in full else share / left if left else 1.0 for expert, share in enumerate(shares)]
        scale = sum(open_) or 1.0
        rest = _split(total - most * len(full), [share / scale for share in open_])
        rows = [most if expert in full else taken for expert, taken in enumerate(rest)]
        over = {expert for expert, taken in enumerate(rows) if taken > most}
        if not over:
            return rows
        full |= over


def _split(total: int, shares: list[float]) -> list[int]:
    """Ints in proportion to the shares that sum to the total: largest remainders first."""
    exact = [total * share for share in shares]
    rows = [int(value - 1e-9) for value in exact]  # never one too many where a product was rounded up
    by_remainder = sorted(range(len(rows)), key=lambda index: rows[index] - exact[index])
    for index in by_remainder[: total - sum(rows)]:
        rows[index] += 1
    return rows
