"""What a tracker writes: storages, their births and deaths in order, phases, layers, messages and work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from moetune.memory.report import PartName, Phase
from moetune.memory.time.work import Done
from moetune.parallel.messages import Message


@dataclass(slots=True)
class Block:
    """One storage.

    Attributes:
        part: final when the trace ends: a gradient is known as one after its birth.
        module, op: what made it.
        born, died: places in the log; `died` is None if it outlives the trace.
        on_host: it is host memory, which counts apart.
        managed: it is host memory that the driver may move to the device.
        fetched: it is a copy on the device of host memory.
        layer: the decoder layer of a weight, a gradient or an optimizer state, whenever it is born.
        experts: the experts whose rows were being computed together.
        in_bank: it is loaded with an expert bank.
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
    experts: tuple[int, ...] = ()
    in_bank: bool = False


@dataclass(frozen=True)
class Mark:
    """The start of a phase, or of a module's part of it, at a place of the log."""

    at: int
    step: int
    micro_step: int
    phase: Phase
    module: str


OUTSIDE = -1
"""In place of a layer's number: what follows belongs to no layer, until the first one ends or the last one begins."""


class Cut(NamedTuple):
    """A place of the log where a decoder layer's forward ends, or its backward begins."""

    at: int
    layer: int
    backward: bool


class Sent(NamedTuple):
    """A message to other ranks, the place of the log at which it left, and the block that was sent."""

    at: int
    step: int
    micro_step: int
    phase: Phase
    message: Message
    block: int | None


@dataclass
class Log:
    """Everything that a tracker writes.

    Attributes:
        blocks: every storage, in order of birth.
        entries: births and deaths in order: the number of a block, or ~number when it dies.
        marks: where phases and modules begin.
        cuts: where layers end in forward and begin in backward.
        sent: messages to other ranks.
        done: work of operations, if it was counted.
    """

    blocks: list[Block] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)

    def place(self) -> int:
        """The place at which the next entry will be."""
        return len(self.entries)
