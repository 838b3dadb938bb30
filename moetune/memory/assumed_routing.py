"""Assumed rows per expert: balanced, skewed, worst, or recorded.

Sizes in this file: T tokens, K chosen experts per token, E experts. The experts of a layer receive T·K rows in all.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor

from moetune.errors import UserError
from moetune.experts.context import CountRows, ReadCounts
from moetune.files import expanded
from moetune.run.folder_files import read_expert_load
from moetune.run.scores import LayerScores, read_intervals


@dataclass(frozen=True)
class AssumedRouting:
    """An assumption about how the rows of a layer are distributed over its experts.

    Attributes:
        name: as written after `--routing`.
        fullest: load of the fullest expert as a multiple of the mean; None for `worst` or a recorded load.
        load: (layer, one number per expert) pairs of a recorded load, of which only the proportions within a layer
            count; empty if the same assumption holds for all layers.
        curve: a distribution for any number of experts, as points (share of the experts, fullest first; share of the
            rows that these receive), ascending to (1, 1); used in place of `fullest` if not empty.
        lowest, highest: the most even and the most uneven routing that the data may have; None: this one.
    """

    name: str
    fullest: float | None = 1.0
    load: tuple[tuple[int, tuple[float, ...]], ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    lowest: "AssumedRouting | None" = field(default=None, compare=False)
    highest: "AssumedRouting | None" = field(default=None, compare=False)

    def rows(self, layer: int, tokens: int, top_k: int, num_experts: int) -> list[int]:
        """Return the rows of each expert of a layer: `num_experts` ints that sum to T·K, each at most T.

        Without a recorded load the last experts are the fullest. Expert gradients accumulate in index order, so this
        order needs most memory. For `worst`, K experts receive as many rows as possible, but every other expert still
        receives one row if there are enough, because it then has gradients too. Raises `UserError` if the recorded load
        lacks this layer, or has another number of experts.
        """
        if self.curve:
            return _by_curve(self.curve, tokens, top_k, num_experts)
        if not self.load:
            return _rows(self.fullest, tokens, top_k, num_experts)
        shares = dict(self.load).get(layer)
        if shares is None or len(shares) != num_experts:
            given = "nothing" if shares is None else f"{len(shares)} experts"
            raise UserError(f"--routing {self.name!r} has {given} for layer {layer}, which has {num_experts} experts")
        return _capped(tokens * top_k, tokens, shares)

    def count_rows(self, layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        """Return the assumed rows of each expert; `ids` [T, K] are the chosen experts, of which only the shape is used.

        Replaces `ExpertHooks.count_rows` in a trace; `read` is not called.
        """
        return self.rows(layer, ids.numel() // ids.shape[-1], ids.shape[-1], num_experts)


BALANCED = AssumedRouting("balanced")
PUBLISHED = AssumedRouting(
    "as uneven as published scores",
    curve=(
        (1 / 64, 0.088), (1 / 32, 0.163), (1 / 16, 0.282), (1 / 8, 0.454),
        (1 / 4, 0.652), (1 / 2, 0.854), (3 / 4, 0.955), (1.0, 1.0),
    ),
)  # fmt: skip
"""The most uneven routing that is taken to be possible where no data were scored.

Source: the token scores that ESFT published of DeepSeek-V2-Lite (github.com/deepseek-ai/ESFT,
results/expert_scores/*/summary.json: 64 experts, 26 layers, four tasks). These are the means over the layers of the
task that concentrates most, translation: its fullest expert receives 8.8 % of the rows, its fullest eighth 45.4 %. The
mean of all four tasks is 34.2 %.
"""
UNKNOWN = replace(BALANCED, highest=PUBLISHED)
"""The routing of data that were not scored: balanced is expected, and up to `PUBLISHED` is possible."""
_MOST_SKEW = 1_000_000


@dataclass(frozen=True)
class Replayed(AssumedRouting):
    """Recorded routing: the rows that experts received in each call of real steps, for a trace of the same steps.

    Attributes:
        steps: number of recorded steps; all their micro-steps are recorded.
        calls: rows of each expert, [calls][experts], in the order in which expert layers were called.
    """

    steps: int = 0
    calls: tuple[tuple[int, ...], ...] = ()

    def answers(self) -> CountRows:
        """Return a replacement for `ExpertHooks.count_rows`, each call of which returns the next element of `calls`."""
        left = iter(self.calls)
        return lambda layer, ids, num_experts, read: list(next(left))


def parse_routing(text: str | None) -> AssumedRouting:
    """Parse the value of `--routing`; None, if it is not given, is `UNKNOWN`.

    - `balanced`: all experts receive equally many rows.
    - `skew:S`: the fullest expert receives S times the mean, 1 ≤ S ≤ 1,000,000.
    - `worst`: nearly all tokens choose the same K experts.
    - otherwise the path of a JSON file with `{"expert_load": {"<layer>": [tokens of expert 0, ...]}}`, such as
      `memory.json` in a run folder or `scores.json`. `lowest` is then a balanced load, and `highest` that at the ends
      of the intervals in scores.

    Raises:
        UserError: `text` is none of these, or the file does not hold such a load.
    """
    if text is None:
        return UNKNOWN
    if text in ("balanced", "worst"):
        return AssumedRouting(text, 1.0 if text == "balanced" else None)
    if text.startswith("skew:"):
        try:
            skew = float(text.removeprefix("skew:"))
        except ValueError:
            skew = 0.0
        if not 1 <= skew <= _MOST_SKEW:
            raise UserError(
                f"--routing {text!r}: skew is the fullest expert's load over the mean, a number from 1 to "
                f"{_MOST_SKEW:,}; for the most uneven routing use worst"
            )
        return AssumedRouting(text, skew)
    if not expanded(text).is_file():
        raise UserError(f"--routing {text!r}: give balanced, skew:S, worst, or an existing file")
    load = AssumedRouting(text, None, tuple(read_expert_load(expanded(text), "--routing").items()))
    return replace(load, lowest=BALANCED, highest=_least_even(load, read_intervals(expanded(text))))


def _least_even(load: AssumedRouting, layers: dict[int, LayerScores]) -> AssumedRouting | None:
    """Return `load` with each expert at the end of its 95 % interval (in the scores `layers`) that is farther from an
    even share; None without scores."""
    if not layers:
        return None
    shares = []
    for layer, scores in layers.items():
        even = 1 / scores.num_experts
        intervals = zip(scores.all.share, scores.all.interval, strict=True)
        shares.append(
            (layer, tuple(max(share, high) if share > even else min(share, low) for share, (low, high) in intervals))
        )
    return AssumedRouting(f"{load.name}, at the ends of its intervals", None, tuple(shares))


def _by_curve(curve: tuple[tuple[float, float], ...], tokens: int, top_k: int, num_experts: int) -> list[int]:
    """Return the rows of E experts by a `curve`, the fullest last; every expert receives one if there are enough."""
    points = ((0.0, 0.0), *curve)

    def received(share: float) -> float:
        """Return the share of the rows that the fullest `share` of the experts receive, by linear interpolation."""
        (x, y), (further, higher) = next((left, right) for left, right in pairwise(points) if share <= right[0])
        return y + (higher - y) * (share - x) / (further - x)

    total, least = tokens * top_k, int(tokens * top_k >= num_experts)
    ends = [received(number / num_experts) for number in range(num_experts + 1)]
    shares = tuple(after - before for before, after in pairwise(ends))[::-1]
    return sorted(least + rows for rows in _capped(total - least * num_experts, tokens - least, shares))


def _rows(fullest: float | None, tokens: int, top_k: int, num_experts: int) -> list[int]:
    """Return the rows of each of E experts for an assumption without a recorded load.

    With `fullest`, the last expert has this multiple of the mean, and the others share the rest evenly. If it is None,
    the last experts receive as many rows as possible, but every other expert at least one if there are enough.
    """
    total = tokens * top_k
    most = tokens if fullest is None else min(tokens, -int(-min(fullest, num_experts) * total // num_experts))
    if fullest is None:
        rows = [tokens]
        for waiting in reversed(range(num_experts - 1)):  # number of experts that still need a row each
            left = total - sum(rows)
            rows.append(min(tokens, max(left - waiting, min(left, 1))))
        return rows[::-1]
    rest = _split(total - most, [1 / (num_experts - 1)] * (num_experts - 1)) if num_experts > 1 else []
    return [*rest, most]


def _capped(total: int, most: int, shares: tuple[float, ...]) -> list[int]:
    """Distribute `total` rows in proportion to `shares`; what exceeds `most` for one expert goes to the others."""
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
    """Distribute `total` into ints in proportion to `shares`, which sum to 1, by the largest remainder method."""
    exact = [total * share for share in shares]
    rows = [int(value - 1e-9) for value in exact]  # 1e-9: a product that was rounded up must not count as a whole row
    by_remainder = sorted(range(len(rows)), key=lambda index: rows[index] - exact[index])
    for index in by_remainder[: total - sum(rows)]:
        rows[index] += 1
    return rows
