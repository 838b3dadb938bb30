"""Seconds of a step, from its work and the card's data sheet, as a range.

    card  = (F16 / P16 + F32 / P32 + B / M) / REACHED      seconds that the card computes
    host  = launches · LAUNCH + own launches · (OWN_LAUNCH - LAUNCH)      seconds that the host takes to ask for it
    step  = max(card, host)

F16, F32: FLOPs of products in 16 and 32 bits, B bytes that operations read and write, P16, P32, M: the card's FLOP/s
and bytes/s. The constants follow from steps that were measured on cards (docs/benchmarks/step_times.json; the fit is
scripts/bench/step_times.py). Copies from and to the host, what the host computes, and messages between ranks were never
measured beside a step: at the fast end they cost nothing unless they take longest, at the slow end all is waited for.
Explained in docs/concepts/time.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moetune.memory.time.work import Work, WorkPart
from moetune.models.catalog.gpus import Gpu

REACHED = 0.79
"""Share of FLOP/s and of bandwidth: the best of kernels on an H200 (docs/benchmarks/kernels_bandwidth.json)."""
LAUNCH, OWN_LAUNCH = 19e-6, 139e-6
"""Seconds of the host for a launch, by torch and by Python (`Work.own_launches`), Python of the model included: their
ratio as measured on a device that computes nothing, their size as fitted to steps on cards."""
LINK = 0.85
"""Share of a link's bandwidth that large copies reach: 82 to 87 % of the link to the host, on an H200."""
HOST_MEMORY = 25e9
"""Bytes/s of what the host computes: an estimate."""
MEASURED = frozenset({(9, 0)})
"""Compute capabilities of the cards on which steps were measured."""


@dataclass(frozen=True)
class Range:
    """An estimate as the values at its fast and its slow end, such as seconds or tokens per second."""

    fast: float
    slow: float

    @property
    def middle(self) -> float:
        """Geometric mean of both ends, rounded to four significant digits."""
        return float(f"{(self.fast * self.slow) ** 0.5:.4g}")

    def to_json(self) -> dict[str, float]:
        """Return both ends, rounded to four significant digits."""
        return {"fast": float(f"{self.fast:.4g}"), "slow": float(f"{self.slow:.4g}")}


SPREAD, SPREAD_ELSEWHERE = Range(1 / 1.6, 1.6), Range(1 / 1.6, 4.0)
"""Factors from the formula to both ends, on a card of a kind that was measured and on any other: there the slow end
reaches what others published of such cards."""


@dataclass(frozen=True)
class Duration:
    """Estimated time of a step.

    Attributes:
        tokens: tokens per step, over all ranks.
        flops: FLOPs per step on one rank.
        limit: FLOP/s of the GPU in bfloat16, or in float16 if its tensor cores lack bfloat16 (`gpus.yaml`).
        seconds: seconds per step.
        parts: part of the step -> seconds that it would take alone; includes `launches` and `communication`.
        work: part of the step -> its work on one rank.
        of_card: whether steps were measured on a card of this compute capability.
        measured: tokens per second of a run whose measured speed replaces the estimate, so that both ends of `seconds`
            are equal; None for an estimate.
    """

    tokens: int
    flops: float
    limit: float
    seconds: Range
    parts: Mapping[str, Range]
    work: Mapping[WorkPart, Work]
    of_card: bool
    measured: float | None = None

    @property
    def tokens_per_second(self) -> Range:
        """Tokens per second, over all ranks."""
        return Range(self.tokens / self.seconds.fast, self.tokens / self.seconds.slow)

    def hours(self, tokens: int) -> Range:
        """Return the hours that training on `tokens` tokens takes."""
        speed = self.tokens_per_second
        return Range(tokens / speed.fast / 3600, tokens / speed.slow / 3600)

    @property
    def share(self) -> Range:
        """Share of the GPU's 16-bit FLOP/s (`limit`) that the step reaches, 0 to 1."""
        return Range(self.flops / self.seconds.fast / self.limit, self.flops / self.seconds.slow / self.limit)

    def as_measured(self, tokens_per_second: float) -> "Duration":
        """Return a copy whose seconds per step follow from a measured speed."""
        seconds = self.tokens / tokens_per_second
        return replace(self, seconds=Range(seconds, seconds), measured=tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """Return the object under `time` in the output of `moetune predict --json`."""
        return {
            "tokens_per_step": self.tokens,
            "flops_per_step": round(self.flops),
            "seconds_per_step": self.seconds.to_json(),
            "tokens_per_second": self.tokens_per_second.to_json(),
            "share_of_limit": self.share.to_json(),
            "measured_tokens_per_second": self.measured,
            "measured_card": self.of_card,
            "parts": {name: part.to_json() for name, part in self.parts.items()},
            "work": {name: work.to_json() for name, work in self.work.items()},
        }


def duration(
    work: Mapping[WorkPart, Work], tokens: int, card: Gpu, sent: Iterable[int] = (), bubble: float = 0.0
) -> Duration | None:
    """Estimate the time of a step on a GPU; `sent` are the bytes that this rank sends in each collective, and
    `bubble` is the share of the step in which it waits for other stages of a pipeline.

    Returns None if `work` is empty or if one of the GPU's speeds is unknown (16-bit and 32-bit FLOP/s, memory
    bandwidth, host link). Without `card.interconnect`, communication is left out.
    """
    half = card.bf16 or card.fp16
    if not work or half is None or card.fp32 is None or card.bandwidth is None or card.host_link is None:
        return None
    seconds: dict[str, float] = {}
    for part, done in work.items():
        moved = done.bytes / (HOST_MEMORY if part == "host" else card.bandwidth.value * REACHED)
        computed = (done.flops / half.value + done.flops32 / card.fp32.value) / REACHED
        seconds[part] = computed + moved + done.copied / (card.host_link.value * LINK)
    total = sum(work.values(), Work())
    seconds["launches"] = total.launches * LAUNCH + total.own_launches * (OWN_LAUNCH - LAUNCH)
    if card.interconnect is not None:  # bandwidth of both directions together
        seconds["communication"] = sum(sent) / (card.interconnect.value / 2 * LINK)
    beside = [seconds.get(part, 0.0) for part in ("transfers", "host", "communication")]
    step = max(sum(seconds.values()) - sum(beside) - seconds["launches"], seconds["launches"])
    if bubble:
        seconds["bubble"] = step * bubble / (1 - bubble)
        step += seconds["bubble"]
    of_card = card.capability in MEASURED
    spread = SPREAD if of_card else SPREAD_ELSEWHERE
    return Duration(
        tokens=tokens,
        flops=total.flops + total.flops32,
        limit=half.value,
        seconds=Range(max(step, *beside) * spread.fast, (step + sum(beside)) * spread.slow),
        parts={part: Range(taken * spread.fast, taken * spread.slow) for part, taken in seconds.items()},
        work=work,
        of_card=of_card,
    )
