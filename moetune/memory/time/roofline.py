"""Roofline estimate of a step's seconds on a GPU from its work, as a range from a fast to a slow end.

    t(part)     = max(((F16 + i·I) / P16 + F32 / P32) / p, Bp / (M·m)) + B / (M·m) + C / (L·l)      seconds
    t(launches) = launches · a + synchronizations · s
    fast        = max(Σ t(part) over parts on the GPU, t(transfers), t(host), t(launches), t(communication))
    slow        = sum of the same terms

The fast end assumes that these terms overlap completely, the slow end that they run one after the other.

Work of a part: F16, F32 FLOPs of matrix products in 16 and 32 bits; I FLOPs that multiprocessors without a tile of a
product could do meanwhile, which count at the slow end alone, i = 0 and 1 (occupancy.py); Bp bytes read and written by
products, B by all other operations; C bytes copied between host and GPU. Limits of the GPU: P16, P32 FLOP/s; M memory
bandwidth and L host link in bytes/s. Factors, each with a value for either end: p, m, l the share of each limit that is
reached; a and s the seconds of a launch and of a synchronization. They are `FACTORS`, or on this machine's card what
`moetune doctor --measure` found (speeds.py), with i = 1 at both ends. For the part `host`, computed on the CPU, B is
divided by the bandwidth of host memory. t(communication): bytes sent / (half of the GPU interconnect's bandwidth ·
l). Explained in docs/concepts/time.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moetune.memory.time.speeds import Between, speeds_of
from moetune.memory.time.work import Work, WorkPart
from moetune.models.catalog.gpus import Gpu


@dataclass(frozen=True)
class Factor(Between):
    """An efficiency factor of the estimate.

    Attributes:
        fast, slow: value at the fast and at the slow end: share of a hardware limit that is reached (0 to 1); for
            `launch` and `synchronization` seconds per event; for `host_memory` bytes/s.
        source: where the values come from.
    """

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
"""The factors p (`products`), m (`memory`), l (`link`), a (`launch`), s (`synchronization`), and host bandwidth."""


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
        measured: tokens per second of a run whose measured speed replaces the estimate, so that both ends of `seconds`
            are equal; None for an estimate.
        of_card: whether the speeds of the card were measured on this machine (`moetune doctor --measure`).
    """

    tokens: int
    flops: float
    limit: float
    seconds: Range
    parts: Mapping[str, Range]
    work: Mapping[WorkPart, Work]
    measured: float | None = None
    of_card: bool = False

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


def duration(work: Mapping[WorkPart, Work], tokens: int, card: Gpu, sent: Iterable[int] = ()) -> Duration | None:
    """Estimate the time of a step on a GPU; `sent` are the bytes that this rank sends in each collective.

    Returns None if `work` is empty or if one of the GPU's speeds is unknown (16-bit and 32-bit FLOP/s, memory
    bandwidth, host link). Without `card.interconnect`, communication is left out.
    """
    half = card.bf16 or card.fp16
    if not work or half is None or card.fp32 is None or card.bandwidth is None or card.host_link is None:
        return None
    ends, (factors, of_card) = {}, _factors(card)
    for end, idle in (("fast", 1.0 if of_card else 0.0), ("slow", 1.0)):
        factor = {name: getattr(one, end) for name, one in factors.items()}
        parts: dict[str, float] = {
            part: max(
                ((done.flops + idle * done.idle) / half.value + done.flops32 / card.fp32.value)
                / factor["attention" if part == "attention" else "products"],
                done.product_bytes / (card.bandwidth.value * factor["memory"]),
            )
            + done.bytes
            / (
                factor["host_memory"]
                if part == "host"
                else card.bandwidth.value * factor["unpacking" if part == "dequantization" else "memory"]
            )
            + done.copied / (card.host_link.value * factor["link"])
            for part, done in work.items()
        }
        launches = sum(done.launches for done in work.values()) * factor["launch"]
        waits = sum(done.synchronizations for done in work.values()) * factor["synchronization"]
        parts["launches"] = launches + waits
        if card.interconnect is not None:  # bandwidth of both directions together
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
        of_card=of_card,
    )


def _factors(card: Gpu) -> tuple[dict[str, Between], bool]:
    """Return the factors for a card, and whether they were measured on it. The part `attention` has products and
    attention's kernels, so its factor ranges over both."""
    speeds = speeds_of(card)
    found: dict[str, Between] = {str(name): one for name, one in FACTORS.items()}
    found |= {} if speeds is None else {str(kind): one for kind, one in speeds.factors(card).items()}
    found.setdefault("unpacking", found["memory"])
    both = found["products"], found.get("attention", found["products"])
    found["attention"] = Between(max(one.fast for one in both), min(one.slow for one in both))
    return found, speeds is not None
