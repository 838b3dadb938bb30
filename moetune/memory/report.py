"""`MemoryReport` and its parts: a prediction as plain data in integer bytes.

Words: *allocated* are bytes of live tensors in torch's allocator, *reserved* all that the allocator holds, *process*
memory both that and GPU memory outside the allocator. Expected is what a run is predicted to need; it may need less or
more by the report's *unknowns*, and the *span* goes from the least to the most.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from moetune.memory.host import HostMemory
from moetune.memory.time.estimate import Duration
from moetune.memory.unknowns import Span, Unknown, Verdict, always, span

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
ForwardPhase = Literal["generation", "old_logprobs", "reference", "forward", "evaluation"]
FORWARD_PHASES: tuple[ForwardPhase, ...] = get_args(ForwardPhase)
Phase = Literal[ForwardPhase, "load", "recompute", "backward", "optimizer"]
"""Phases of a run; `recompute` repeats the forward pass of a checkpointed layer during backward, `reference` is a
forward pass of the model as it was before training, for preferences, `old_logprobs` one of the model that generated,
over what it generated."""
ONCE_PHASES: tuple[Phase, ...] = ("optimizer", "evaluation")
"""Phases that a step has once, after its micro-steps."""


@dataclass(frozen=True)
class Parts:
    """Bytes of live tensors on one rank at one moment, by purpose.

    Attributes:
        frozen_weights: parameters and buffers that are not trained, including quantization constants.
        trainable_weights: trained parameters in their own dtype.
        gradients: `.grad` of parameters, complete or still being accumulated.
        optimizer_states: all tensors that an optimizer keeps between steps, except master weights.
        master_weights: float32 copies of weights that are stored with fewer bits.
        saved_activations: the batch, and tensors that the forward pass saves for backward.
        transient_peak: everything else: temporaries, recomputed activations, gradients of activations.
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
        """Sum of all parts."""
        return sum(self)

    def __iter__(self) -> Iterator[int]:
        return (getattr(self, name) for name in PART_NAMES)

    def items(self) -> list[tuple[PartName, int]]:
        """Return (name, bytes) of each part, in the order of `PART_NAMES`."""
        return [(name, getattr(self, name)) for name in PART_NAMES]


assert tuple(field.name for field in fields(Parts)) == PART_NAMES


@dataclass(frozen=True)
class Term:
    """One line of the list that explains the peak, for storages with one purpose, such as the experts of all layers.

    Attributes:
        part: the part of the peak in which the bytes are counted.
        name: what the tensors are, or the module and operation that made them.
        numbers: the number of storages, as text.
        bytes: bytes of these storages at the peak.
        page: page of the documentation that explains it, relative to `docs/`, such as `concepts/weights.md`.
    """

    part: PartName
    name: str
    numbers: str
    bytes: int
    page: str


@dataclass(frozen=True)
class Allocation:
    """`count` storages of `bytes` in all that are alive at the peak and were made by the same operation, in the same
    module and phase.

    Attributes:
        part: the part of the peak in which they are counted.
        module: path of the module; empty if made outside any module.
        op: name of the operation, or a label of the tensors.
    """

    part: PartName
    module: str
    phase: Phase
    op: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Moment:
    """The moment of a run at which most memory is allocated.

    Attributes:
        step, micro_step: counted from 0 in the traced steps.
        phase, module: what was running; `module` is empty outside any module.
        largest: the largest groups of live storages at that moment, largest first.
    """

    step: int
    micro_step: int
    phase: Phase
    module: str
    largest: tuple[Allocation, ...]


@dataclass(frozen=True)
class Sample:
    """Bytes of live tensors at the fullest moment of one section of a timeline. `label` names the phase that begins
    with the section, such as `backward 0` for micro-step 0; else it is empty."""

    label: str
    parts: Parts


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of the process of one rank, in bytes.

    Attributes:
        rank: number of the rank, from 0.
        parts: live tensors on the GPU at the peak, by purpose; their sum is `peak_allocated`.
        outside_allocator: GPU memory outside torch's allocator: CUDA context, NCCL buffers, and managed memory of paged
            optimizer states.
        peak_reserved: most GPU memory that torch's allocator holds at once, in use or cached.
        host_bytes: most bytes at once of tensors that settings move to host memory: quantized experts, layers' inputs,
            optimizer states.
        terms: lines that explain `peak_allocated` and sum to it.
        layers: bytes of `peak_allocated` that belong to each decoder layer of the rank, in order, without transient
            ones; empty if they were not told apart.
        sent: bytes that the rank sends in a step.
        holds: of a pipeline the layers of the rank, and its micro-batches in flight, in words.
        card: the rank's own GPU in a run on unlike ones; None if all have that of the report.
    """

    rank: int
    parts: Parts
    outside_allocator: int
    peak_reserved: int
    host_bytes: int = 0
    terms: tuple[Term, ...] = ()
    layers: tuple[int, ...] = ()
    sent: int = 0
    holds: str = ""
    card: "GpuMemory | None" = None

    @property
    def usable(self) -> int:
        """Bytes that processes can use of the rank's own GPU; 0 if all ranks have that of the report."""
        return 0 if self.card is None else self.card.usable_bytes

    @property
    def peak_allocated(self) -> int:
        """Bytes of live tensors on the GPU at the peak."""
        return self.parts.total

    @property
    def needed(self) -> int:
        """Bytes that its GPU must have for a step, without the allocator's cache."""
        return self.peak_allocated + self.outside_allocator

    @property
    def peak_process(self) -> int:
        """GPU memory of the whole process: reserved by the allocator plus outside of it."""
        return self.peak_reserved + self.outside_allocator

    def to_json(self) -> dict[str, int]:
        """Return an element of `ranks` in the output of `moetune predict --json`."""
        return {
            "rank": self.rank,
            **dict(self.parts.items()),
            "outside_allocator": self.outside_allocator,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "peak_process": self.peak_process,
            "host_bytes": self.host_bytes,
            "sent_bytes": self.sent,
        }


@dataclass(frozen=True)
class Collective:
    """Communication of one kind, along one axis and in one phase of a step.

    Attributes:
        axis: the axis of the mesh along which the ranks communicate, such as `fsdp`.
        what: the phase of the step, such as `in backward`.
        calls: number of calls in the step.
        bytes: bytes that each rank sends in all `calls`.
    """

    kind: Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "reduce", "broadcast", "point-to-point"]
    axis: str
    what: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class LoadPeaks:
    """Peak bytes of host and GPU memory while weights are loaded, before the first step."""

    host: int
    gpu: int


@dataclass(frozen=True)
class Change:
    """A change of the run file that reduces memory.

    Attributes:
        settings: `key=value` strings, in the form that `--set` takes.
        saves: bytes by which `MemoryReport.required` decreases.
        peak_process: `MemoryReport.required` with the change, in bytes: without the allocator's cache.
        fits: whether the run fits with the change; a tight fit counts.
        why: how the change saves memory, in a few words.
    """

    settings: tuple[str, ...]
    saves: int
    peak_process: int
    fits: bool
    why: str


@dataclass(frozen=True)
class GpuMemory:
    """The GPU of a prediction: its name, and `usable_bytes`, the bytes of its memory that processes can use."""

    name: str
    usable_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """The prediction of a run's memory and of a step's time.

    Attributes:
        model: `model.path` of the run file.
        gpu: None if no GPU was named; then there is no verdict on it.
        ranks: memory of each rank, in order.
        assumptions: what the prediction assumes, one sentence each.
        load: peaks while weights are loaded.
        moment: when the peak of the fullest rank occurs, and its largest allocations.
        timeline: live bytes of the fullest rank during the last traced step.
        collectives: communication of a step; empty without other ranks.
        changes: changes, each enough by itself, with which a run that does not surely fit would do so, mildest first.
        notes: messages for the user, such as that no time can be estimated.
        about: (label, text) pairs that describe the run.
        time: estimated time of a step; None if the GPU's speed is unknown.
        unknowns: what is not known of routing and CUDA context; what no prediction knows is in `every_unknown` only.
        phases: (phase, most live bytes of the fullest rank in it), in order.
        trainer: name of TRL's trainer that was traced; None for moetune's own steps.
        host: memory of the machine; None if it was not predicted.
        device: where the model is. On a CPU all tensors are host memory.
    """

    model: str
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
    unknowns: tuple[Unknown, ...] = ()
    phases: tuple[tuple[Phase, int], ...] = ()
    trainer: str | None = None
    host: HostMemory | None = None
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def fullest(self) -> RankMemory:
        """The rank whose process takes most GPU memory; on unlike GPUs the one that leaves least of its own."""
        return max(self.ranks, key=lambda rank: rank.peak_process - rank.usable)

    @property
    def peak_process(self) -> int:
        """Peak GPU memory of the fullest rank's process, in a step or during loading, allocator's cache included."""
        return max(self.fullest.peak_process, self.load.gpu + self.fullest.outside_allocator)

    @property
    def headroom_bytes(self) -> int | None:
        """Usable bytes of the GPU minus `required`, negative if it does not fit; None without a GPU."""
        return None if self.gpu is None else self.gpu.usable_bytes - self.required

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the fullest rank."""
        return self.fullest.terms

    @property
    def required(self) -> int:
        """Bytes that the GPU must have: peak of live tensors, in a step or during loading, plus `outside_allocator`.
        The allocator's cache is not included, because it is released when the GPU is full."""
        like_it = (rank.peak_allocated for rank in self.ranks if rank.usable == self.fullest.usable)
        return max(*like_it, self.load.gpu) + self.fullest.outside_allocator

    @property
    def span(self) -> Span:
        """The least and the most bytes that the GPU must have, and `required`, which is expected, between them."""
        return span(self.required, self.unknowns)

    @property
    def every_unknown(self) -> tuple[Unknown, ...]:
        """All reasons why `span` is no single number: `unknowns`, what the allocator cannot reuse, errors."""
        return (*self.unknowns, *always(self.required, self.unknowns))

    @property
    def least_headroom(self) -> int:
        """Bytes of the GPU that the run leaves free if it needs the most of its `span`; negative if that does not fit.
        There must be a `gpu`."""
        assert self.gpu is not None
        return self.gpu.usable_bytes - self.span.high

    @property
    def verdict(self) -> Verdict | None:
        """The worse of `card_verdict` and `host_verdict`, of those that are not None; None if both are."""
        known = [verdict for verdict in (self.card_verdict, self.host_verdict) if verdict is not None]
        return max(known, key=get_args(Verdict).index, default=None)

    @property
    def card_verdict(self) -> Verdict | None:
        """Whether the GPU can hold the run; None without a GPU."""
        return None if self.gpu is None else self.span.verdict(self.gpu.usable_bytes)

    @property
    def host_verdict(self) -> Verdict | None:
        """Whether the host can hold the run; None if it is not known how much memory the host has."""
        return None if self.host is None or self.host.room is None else self.host.span.verdict(self.host.room.value)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; a tight fit counts. None without a verdict."""
        return None if self.verdict is None else self.verdict != "no"

    def figures(self) -> dict[str, Any]:
        """Return the JSON values by which plans and comparisons describe a run: method, verdict, and bytes."""
        return {
            "method": "trace",
            "verdict": self.verdict,
            "required_bytes": self.required,
            "required_range": self.span.to_json(),
            "headroom_bytes": self.headroom_bytes,
            "peak_process": self.peak_process,
            "host_bytes": self.fullest.host_bytes,
            "host": None if self.host is None else self.host.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the object that `moetune predict --json` prints."""
        return {
            "schema": 1,
            "model": self.model,
            "about": dict(self.about),
            "method": "trace",
            "device": self.device,
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "fits": self.fits,
            "verdict": self.verdict,
            "headroom_bytes": self.headroom_bytes,
            "required_bytes": self.required,
            "required_range": self.span.to_json(),
            "host": None if self.host is None else {**self.host.to_json(), "verdict": self.host_verdict},
            "unknowns": [asdict(unknown) for unknown in self.every_unknown],
            "assumptions": list(self.assumptions),
            "ranks": [rank.to_json() for rank in self.ranks],
            "terms": [asdict(term) for term in self.terms],
            "load": asdict(self.load),
            "peak": None if self.moment is None else asdict(self.moment),
            "trainer": self.trainer,
            "phases": dict(self.phases),
            "collectives": [asdict(collective) for collective in self.collectives],
            "changes": [asdict(change) for change in self.changes],
            "notes": list(self.notes),
            "time": None if self.time is None else self.time.to_json(),
        }
