"""Time of a step on a card from its work: a roofline, between a fast and a slow end.

    t(part)  = max(F16 / (P16·p) + F32 / (P32·p), Bp / (M·m)) + B / (M·m) + C / (L·l)
    t(host)  = launches · a + synchronizations · s
    fast     = max(Σ t(part) of what computes, t(transfers), t(communication), t(host))     all at once
    slow     = the sum of these                                                             one after the other

F: operations of products in 16 and 32 bits, Bp their bytes, B those of all else, C copied between host and device; P,
M, L: throughput, memory bandwidth, link of the card; p, m, l: the share of each that is reached, a and s seconds
(`FACTORS`). docs/concepts/time.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moetune.memory.time.work import Work, WorkPart
from moetune.models.catalog.gpus import Gpu


@dataclass(frozen=True)
class Factor:
    """Share of a limit that is reached, or seconds of an event: at the fast end and at the slow one."""

    fast: float
    slow: float
    source: str


FACTORS: Mapping[Literal["products", "memory", "link", "launch", "synchronization", "host_memory"], Factor] = {
    "products": Factor(
        0.87,
        1 / 6,
        "fast: the best of any shape on an A100, 271 of 312 TFLOP/s; an H100 reaches 80 % (Maximum Achievable Matmul "
        "FLOPS, github.com/stas00/ml-engineering/tree/master/compute/accelerator). slow: an estimate, below what "
        "published runs of mixtures of experts reach as a whole: 13 % in github.com/NVIDIA/Megatron-LM/issues/756, "
        "Mixtral-8x7B on H100s, messages between them included; 16 % with 4-bit weights on one RTX 5090",
    ),
    "memory": Factor(0.92, 1 / 3, "estimate: a large copy, and kernels that store two bytes at a time as NF4's"),
    "link": Factor(0.85, 0.40, "estimate: large copies from pinned memory, and small ones"),
    "launch": Factor(
        5e-6,
        20e-6,
        "fast: estimate, what torch and the driver take for an operation; slow: 9.9 s of host time for 493,000 "
        "launches, measured of a step's host side without a GPU",
    ),
    "synchronization": Factor(10e-6, 50e-6, "estimate"),
    "host_memory": Factor(60e9, 10e9, "estimate: bytes/s of a host's memory, all channels and one thread"),
}


@dataclass(frozen=True)
class Range:
    """Seconds, or tokens a second: the fast end and the slow one."""

    fast: float
    slow: float

    @property
    def middle(self) -> float:
        """The geometric mean of both ends, which are apart by a factor."""
        return float(f"{(self.fast * self.slow) ** 0.5:.4g}")

    def to_json(self) -> dict[str, float]:
        return {"fast": float(f"{self.fast:.4g}"), "slow": float(f"{self.slow:.4g}")}


@dataclass(frozen=True)
class Duration:
    """Time of a step.

    Attributes:
        tokens: of a step, of all ranks.
        flops: of a step, on one rank.
        limit: operations a second of the card in 16 bits.
        seconds: of a step.
        parts: seconds of each part on the card, as if it were alone; `launches` and `communication` among them.
        measured: tokens a second of a run that stands in for the factors; then both ends are its.
    """

    tokens: int
    flops: float
    limit: float
    seconds: Range
    parts: Mapping[str, Range]
    work: Mapping[WorkPart, Work]
    measured: float | None = None

    @property
    def tokens_per_second(self) -> Range:
        return Range(self.tokens / self.seconds.fast, self.tokens / self.seconds.slow)

    def hours(self, tokens: int) -> Range:
        """For so many tokens."""
        speed = self.tokens_per_second
        return Range(tokens / speed.fast / 3600, tokens / speed.slow / 3600)

    @property
    def share(self) -> Range:
        """Of the card's limit, from 0 to 1."""
        return Range(self.flops / self.seconds.fast / self.limit, self.flops / self.seconds.slow / self.limit)

    def as_measured(self, tokens_per_second: float) -> Duration:
        """The same at the speed of a run like this one."""
        seconds = self.tokens / tokens_per_second
        return replace(self, seconds=Range(seconds, seconds), measured=tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """`time` in `moetune predict --json`."""
        return {
            "tokens_per_step": self.tokens,
            "flops_per_step": round(self.flops),
            "seconds_per_step": self.seconds.to_json(),
            "tokens_per_second": self.tokens_per_second.to_json(),
            "share_of_limit": self.share.to_json(),
            "measured_tokens_per_second": self.measured,
            "parts": {name: part.to_json() for name, part in self.parts.items()},
            "work": {name: work.to_json() for name, work in self.work.items()},
        }


def duration(work: Mapping[WorkPart, Work], tokens: int, card: Gpu, sent: Iterable[int] = ()) -> Duration | None:
    """Time of a step's work on a card; None if its speed is not known, or nothing was counted.

    Args:
        tokens: of the step, of all ranks.
        sent: bytes that leave this rank.
    """
    half = card.bf16 or card.fp16
    if not work or half is None or card.fp32 is None or card.bandwidth is None or card.host_link is None:
        return None
    ends = {}
    for end in ("fast", "slow"):
        factor = {name: getattr(one, end) for name, one in FACTORS.items()}
        memory = card.bandwidth.value * factor["memory"]
        parts: dict[str, float] = {
            part: max(
                (done.flops / half.value + done.flops32 / card.fp32.value) / factor["products"],
                done.product_bytes / memory,
            )
            + done.bytes / (factor["host_memory"] if part == "host" else memory)
            + done.copied / (card.host_link.value * factor["link"])
            for part, done in work.items()
        }
        launches = sum(done.launches for done in work.values()) * factor["launch"]
        waits = sum(done.synchronizations for done in work.values()) * factor["synchronization"]
        parts["launches"] = launches + waits
        if card.interconnect is not None:  # which counts both directions
            parts["communication"] = sum(sent) / (card.interconnect.value / 2 * factor["link"])
        ends[end] = parts
    beside = ("transfers", "host", "launches", "communication")
    fast = [sum(seconds for part, seconds in ends["fast"].items() if part not in beside)]
    fast += [ends["fast"].get(part, 0.0) for part in beside]
    seconds = Range(max(fast), sum(ends["slow"].values()))
    return Duration(
        tokens=tokens,
        flops=sum(done.flops + done.flops32 for done in work.values()),
        limit=half.value,
        seconds=seconds,
        parts={part: Range(ends["fast"][part], ends["slow"][part]) for part in ends["fast"]},
        work=work,
    )
