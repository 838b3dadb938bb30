"""Results of a prediction: integer bytes by rank, with their sources. Formatting is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from moetune.memory.time.roofline import Duration

PartName = Literal[
    "frozen_weights",
    "trainable_weights",
    "gradients",
    "optimizer_states",
    "master_weights",
    "saved_activations",
    "transient_peak",
]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)
Phase = Literal["load", "forward", "recompute", "backward", "optimizer", "evaluation"]


Verdict = Literal["yes", "tight", "no"]
TIGHT_PERCENT = 2
"""Margin: the largest deviation seen of a prediction, 0.5 %, plus that of reserved memory, 1.5 %."""


@dataclass(frozen=True)
class Parts:
    """Bytes that are alive at one moment, by what they are.

    Attributes:
        frozen_weights: parameters and buffers that never change, quantization constants included.
        trainable_weights: parameters that train, in their own dtype.
        gradients: what backward leaves, or has begun to leave, in `.grad`.
        optimizer_states: everything an optimizer keeps between steps but master weights.
        master_weights: float32 copies of weights of fewer bits.
        saved_activations: the batch, and what the forward pass keeps for backward.
        transient_peak: all else: temporaries, recomputed activations, gradients of activations.
    """

    frozen_weights: int = 0
    trainable_weights: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    master_weights: int = 0
    saved_activations: int = 0
    transient_peak: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def __iter__(self) -> Iterator[int]:
        return (getattr(self, name) for name in PART_NAMES)

    def items(self) -> list[tuple[PartName, int]]:
        return [(name, getattr(self, name)) for name in PART_NAMES]


assert tuple(field.name for field in fields(Parts)) == PART_NAMES


@dataclass(frozen=True)
class Term:
    """One line of the closed form: what it is, its formula, the numbers put in, and the page that explains it.

    `page` is relative to the documentation, as in `concepts/weights.md`.
    """

    part: PartName
    name: str
    formula: str
    numbers: str
    bytes: int
    page: str


@dataclass(frozen=True)
class Allocation:
    """Storages alive at the peak that one module made in one phase: `count` of them, `bytes` in all."""

    part: PartName
    module: str
    phase: Phase
    op: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Moment:
    """When the most is alive: in which step and micro-step (from 0), phase and module, and what then."""

    step: int
    micro_step: int
    phase: Phase
    module: str
    largest: tuple[Allocation, ...]


@dataclass(frozen=True)
class Sample:
    """Live bytes at one moment of the timeline. `label` is empty but where a phase begins."""

    label: str
    parts: Parts


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes at its peak.

    `peak_allocated` is the sum of `parts`; `peak_reserved` what the caching allocator then holds; `outside_allocator`
    what the driver, libraries and communication take beside it; `peak_process` the last two together. `host_bytes` is
    the most that its tensors take in host memory. `terms` sum to
    `peak_allocated`.
    """

    rank: int
    parts: Parts
    outside_allocator: int
    peak_reserved: int
    host_bytes: int = 0
    terms: tuple[Term, ...] = ()

    @property
    def peak_allocated(self) -> int:
        return self.parts.total

    @property
    def peak_process(self) -> int:
        return self.peak_reserved + self.outside_allocator

    def to_json(self) -> dict[str, int]:
        return {
            "rank": self.rank,
            **dict(self.parts.items()),
            "outside_allocator": self.outside_allocator,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "peak_process": self.peak_process,
            "host_bytes": self.host_bytes,
        }


@dataclass(frozen=True)
class Collective:
    """One kind of communication in a step, in bytes sent by each rank."""

    kind: Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "reduce", "broadcast", "point-to-point"]
    axis: str
    what: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class LoadPeaks:
    """Peaks of host and GPU memory while weights are loaded."""

    host: int
    gpu: int


@dataclass(frozen=True)
class Change:
    """One change of the run file and the process memory that it saves on the fullest rank."""

    settings: tuple[str, ...]  # as `--set` takes them
    saves: int
    peak_process: int
    fits: bool
    why: str


@dataclass(frozen=True)
class GpuMemory:
    """The card of a prediction. `usable_bytes` is the limit of a whole process."""

    name: str
    usable_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """A whole prediction. Frozen, and it carries what was predicted (`about`, in words by name) and what it assumed.

    `time` is how long a step takes: of a trace, for a card whose speed is known.
    """

    model: str
    method: Literal["trace", "formula"]
    gpu: GpuMemory | None
    ranks: tuple[RankMemory, ...]
    assumptions: tuple[str, ...]
    load: LoadPeaks
    moment: Moment | None = None
    timeline: tuple[Sample, ...] = ()
    collectives: tuple[Collective, ...] = ()
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()
    time: Duration | None = None

    @property
    def fullest(self) -> RankMemory:
        """The rank with the largest process."""
        return max(self.ranks, key=lambda rank: rank.peak_process)

    @property
    def peak_process(self) -> int:
        """Peak of any rank's process, loading included."""
        return max(self.fullest.peak_process, self.load.gpu + self.fullest.outside_allocator)

    @property
    def headroom_bytes(self) -> int | None:
        """Usable bytes beyond `required`, negative if too few; None without a card."""
        return None if self.gpu is None else self.gpu.usable_bytes - self.required

    @property
    def terms(self) -> tuple[Term, ...]:
        """Those of the fullest rank."""
        return self.fullest.terms

    @property
    def required(self) -> int:
        """Bytes that the card must have: tensors at the peak, or while weights load, and memory outside the allocator.
        The allocator's cache is not included: on a full card it is released."""
        return max(max(rank.peak_allocated for rank in self.ranks), self.load.gpu) + self.fullest.outside_allocator

    @property
    def allowance(self) -> int:
        """Margin for the method's own error and for fragmentation (docs/concepts/allocator.md)."""
        return self.required * TIGHT_PERCENT // 100

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits: `tight` if less is left than `allowance`; None without a card. The same by both methods."""
        if self.gpu is None:
            return None
        if self.required > self.gpu.usable_bytes:
            return "no"
        return "tight" if self.required + self.allowance > self.gpu.usable_bytes else "yes"

    @property
    def fits(self) -> bool | None:
        return None if self.verdict is None else self.verdict != "no"

    def figures(self) -> dict[str, Any]:
        """Figures for plans and comparisons."""
        return {
            "method": self.method,
            "verdict": self.verdict,
            "required_bytes": self.required,
            "headroom_bytes": self.headroom_bytes,
            "peak_process": self.peak_process,
            "host_bytes": self.fullest.host_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        """The object that `moetune predict --json` prints."""
        return {
            "schema": 1,
            "model": self.model,
            "about": dict(self.about),
            "method": self.method,
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "fits": self.fits,
            "verdict": self.verdict,
            "headroom_bytes": self.headroom_bytes,
            "assumptions": list(self.assumptions),
            "ranks": [rank.to_json() for rank in self.ranks],
            "terms": [asdict(term) for term in self.terms],
            "load": asdict(self.load),
            "peak": None if self.moment is None else asdict(self.moment),
            "collectives": [asdict(collective) for collective in self.collectives],
            "changes": [asdict(change) for change in self.changes],
            "notes": list(self.notes),
            "time": None if self.time is None else self.time.to_json(),
        }
