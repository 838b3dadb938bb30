"""Record types of a trace: storages allocated and freed, phases, layer boundaries, messages."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moetune.memory.report import PartName, Phase
from moetune.memory.time.work import Done
from moetune.parallel.messages import Message


@dataclass(slots=True)
class Block:
    """One storage, or one workspace that a kernel allocates and frees while it runs.

    Attributes:
        bytes: size as requested, before the allocator rounds it up.
        part: line of the memory report that counts the storage; may change until the trace ends, because a tensor is
            often identified as a gradient or an optimizer state only after it was allocated.
        phase: phase in which the storage was allocated.
        module: path of the innermost named module that was running; empty if none was, or if `op` is a label.
        op: name of the operation that allocated the storage; for weights and optimizer states a label for the report.
        born, died: indices in the tracker's log of the allocation and of the release; None if the storage outlives the
            trace.
        on_host: whether this is host memory, which does not count towards the device's peak.
        fetched: whether this is a copy on the device of a tensor in host memory.
        managed: whether this is CUDA managed memory, which the driver may move to the device; `on_host` is then set.
        layer: number of the decoder layer of a weight, gradient or optimizer state, as in `Watched.layers`; None if it
            follows from where in the log the storage was allocated.
        in_bank: whether this is a tensor of an expert bank.
    """

    bytes: int
    part: PartName
    phase: Phase
    module: str
    op: str
    born: int
    died: int | None = None
    on_host: bool = False
    fetched: bool = False
    managed: bool = False
    layer: int | None = None
    in_bank: bool = False


@dataclass(frozen=True)
class Mark:
    """The start of a phase, or of a module within the phase.

    Attributes:
        at: index in `Log.entries` of the first entry after the start.
        step, micro_step: numbers from 0; `micro_step` counts within the step.
        module: path of the module; empty outside of named modules.
    """

    at: int
    step: int
    micro_step: int
    phase: Phase
    module: str


OUTSIDE = -1
"""Used for a layer number outside of the decoder layers. As `Cut.layer`: in forward, the first decoder layer begins;
in backward, the backward pass is over."""


class Cut(NamedTuple):
    """The end of a decoder layer's forward pass, or the start of its backward pass.

    Attributes:
        at: index in `Log.entries` of the first entry after this point.
        layer: number of the decoder layer, as in `Watched.layers`, or `OUTSIDE`.
        backward: True where a backward pass begins, False where a forward pass ends.
    """

    at: int
    layer: int
    backward: bool


class Turn(NamedTuple):
    """A point from which on a micro-batch computes, of several that go through the layers together.

    Attributes:
        at: index in `Log.entries` of the first entry after this point.
        micro_batch: its number in the step, from 0; `OUTSIDE` for what is computed for none or for all of them.
    """

    at: int
    micro_batch: int


class Sent(NamedTuple):
    """One call of a collective, which sends bytes to other ranks.

    Attributes:
        at: index in `Log.entries` of the first entry after the call.
        step, micro_step: numbers from 0; `micro_step` counts within the step, and is None for what a step does once, in
            the optimizer or the evaluation.
        message: kind of the collective, its bytes and ranks.
        block: index in `Log.blocks` of the call's first tensor; None if the tracker has not recorded that tensor.
    """

    at: int
    step: int
    micro_step: int | None
    phase: Phase
    message: Message
    block: int | None


@dataclass
class Log:
    """Everything that a `Tracker` recorded, in order of time.

    Attributes:
        blocks: every storage, in order of allocation.
        entries: allocations and releases in order: n where `blocks[n]` is allocated, ~n where it is freed.
        marks, cuts, turns: starts of phases and modules; ends and starts of decoder layers; turns of micro-batches.
        sent: collectives that send bytes to other ranks.
        done: FLOPs, bytes and launches of each operation; empty if the tracker does not count work.
    """

    blocks: list[Block] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)

    def lifetimes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices in `entries` of each block's allocation and of its release, -1 without one: [blocks]."""
        entries = np.array(self.entries, dtype=np.int64)
        births, releases = np.flatnonzero(entries >= 0), np.flatnonzero(entries < 0)
        born, died = np.full((2, len(self.blocks)), -1)
        born[entries[births]], died[~entries[releases]] = births, releases
        return born, died
