"""What a tracker has written: storages, their births and deaths in order, and what can be read off them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moetune.errors import UserError
from moetune.memory.allocator import WORKSPACES
from moetune.memory.report import PART_NAMES, Allocation, Collective, LoadPeaks, Moment, PartName, Parts, Phase, Sample
from moetune.memory.time.work import Done, Work, WorkPart, sums
from moetune.parallel.messages import Message


@dataclass(slots=True)
class Block:
    """One storage. `born` and `died` are places in the log; `died` is None if it outlived the trace. `part` is settled
    only when the trace ends: a gradient is known as one after its birth. `on_host` says that it is the host's memory,
    which counts apart, `managed` that the driver may have it on either side, which counts there too, and `fetched` that
    it is a copy of the host's on the device. `layer` is the decoder layer of
    what belongs to one whenever it is born: weights, and states of its optimizer; `experts` those of that layer
    whose rows were being computed together."""

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


@dataclass(frozen=True)
class Mark:
    """From this place of the log on, this phase of this micro-step."""

    at: int
    step: int
    micro_step: int
    phase: Phase
    module: str


_HOLE = -1_000
OUTSIDE = -1
"""In place of a layer's number: what follows belongs to no layer, until the first one ends or the last one begins."""


class Cut(NamedTuple):
    """A place of the log where a decoder layer's forward ends, or its backward begins."""

    at: int
    layer: int
    backward: bool


class Sent(NamedTuple):
    """A message to other ranks, the place of the log at which it left, and the block of what was sent."""

    at: int
    step: int
    micro_step: int
    phase: Phase
    message: Message
    block: int | None


@dataclass
class Log:
    """Everything that a tracker has noted.

    Attributes:
        blocks: every storage, in order of birth.
        entries: births and deaths in order: the number of a block, or ~number when it dies.
        marks: where phases and modules begin.
        cuts: where layers end in forward and begin in backward.
        sent: what was sent to other ranks.
        done: what operations did, where that was counted.
    """

    blocks: list[Block] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """Every storage of the first steps, in order of birth, and what happened when; see `Log`.

    What is on the host is among the blocks, and counts in `host_peak` only.

    Attributes:
        begin: place in the log from which on the peak counts.
        load: the peaks before the first step; None for a trace of real steps.
        collectives: what leaves this rank in the last step, by the phase in which it does.
        work: what a step does on the GPU, by part; empty where it was not counted.
    """

    blocks: Sequence[Block]
    log: Sequence[int]
    marks: Sequence[Mark]
    begin: int = 0
    load: LoadPeaks | None = None
    collectives: tuple[Collective, ...] = ()
    work: Mapping[WorkPart, Work] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Log, begin: int, axis_of: Callable[[Message], str], left_out: int = 0) -> Trace:
        """What a tracker saw.

        Args:
            axis_of: the axis along which a message goes.
            left_out: micro-steps of a step like its second one, which were not run.
        """
        collectives: dict[tuple[str, str, str], list[int]] = {}
        last = max((mark.step for mark in log.marks), default=0)
        for _, step, micro_step, phase, sent, _ in log.sent:
            if step == last and not sent.is_known:
                raise UserError(f"what ranks send cannot be counted: {sent.kind} is no collective that the count knows")
            if step == last and sent.ranks > 1:
                key = (sent.kind, axis_of(sent), f"in {phase}")
                times = 1 + left_out if micro_step == 1 else 1
                collectives.setdefault(key, []).extend([sent.bytes] * times)
        return cls(
            log.blocks,
            log.entries,
            log.marks,
            begin,
            collectives=tuple(Collective(*key, len(sizes), sum(sizes)) for key, sizes in collectives.items()),  # type: ignore[arg-type]
            work=sums((done for done in log.done if done.step == last), left_out),
        )

    @cached_property
    def _changes(self) -> tuple[np.ndarray, np.ndarray]:
        """By place of the log, by how many bytes the device's memory and the host's change there."""
        entries = np.asarray(self.log, dtype=np.int64)
        sizes = np.array([block.bytes for block in self.blocks], dtype=np.int64)
        on_host = np.array([block.on_host for block in self.blocks], dtype=bool)
        numbers = np.where(entries >= 0, entries, ~entries)
        changes = np.where(entries >= 0, sizes[numbers], -sizes[numbers])
        return np.where(on_host[numbers], 0, changes), np.where(on_host[numbers], changes, 0)

    @cached_property
    def peak(self) -> int:
        """Place in the log after which the most is alive on the device."""
        return self.begin + int(np.argmax(np.cumsum(self._changes[0])[self.begin :]))

    @cached_property
    def host_peak(self) -> int:
        """The most bytes that are on the host at once."""
        return int(np.max(np.cumsum(self._changes[1]), initial=0))

    @property
    def managed(self) -> int:
        """The bytes of memory that the driver may have on either side; it stays."""
        return sum(block.bytes for block in self.blocks if block.managed)

    @property
    def workspaces(self) -> int:
        """cuBLAS's: one of each thread that multiplies, of which autograd has its own for backward passes."""
        return WORKSPACES if any(mark.phase == "backward" for mark in self.marks) else 1

    def alive(self, at: int) -> Iterator[Block]:
        """What is alive on the device after this place of the log."""
        return (
            block
            for block in self.blocks
            if block.born <= at and (block.died is None or block.died > at) and not block.on_host
        )

    def parts(self, at: int) -> Parts:
        """The bytes alive after this place of the log, by part."""
        sums = dict.fromkeys(PART_NAMES, 0)
        for block in self.alive(at):
            sums[block.part] += block.bytes
        return Parts(**sums)

    def most(self, part: PartName) -> int:
        """The most bytes of a part that are alive at once on the device."""
        alive = most = 0
        for entry in self.log:
            block = self.blocks[entry if entry >= 0 else ~entry]
            if block.part == part and not block.on_host:
                alive += block.bytes if entry >= 0 else -block.bytes
                most = max(most, alive)
        return most

    def moment(self, largest: int = 20) -> Moment:
        """When the peak is, and the largest allocations then, those of one module, phase and operation together."""
        mark = self.marks[bisect_right(self.marks, self.peak, key=lambda mark: mark.at) - 1]
        groups: dict[tuple[PartName, str, Phase, str], list[int]] = {}
        for block in self.alive(self.peak):
            groups.setdefault((block.part, block.module, block.phase, block.op), []).append(block.bytes)
        allocations = [
            Allocation(part, module, phase, op, len(sizes), sum(sizes))
            for (part, module, phase, op), sizes in groups.items()
        ]
        allocations.sort(key=lambda allocation: -allocation.bytes)
        return Moment(mark.step, mark.micro_step, mark.phase, mark.module, tuple(allocations[:largest]))

    def timeline(self, points: int = 600) -> tuple[Sample, ...]:
        """The last step in about so many samples, each the fullest moment of its stretch; phases are labelled."""
        begin = next(mark.at for mark in self.marks if mark.step == self.marks[-1].step)
        labels: dict[int, str] = {}
        label = ""
        for mark in (mark for mark in self.marks if mark.at >= begin):
            phase = "backward" if mark.phase == "recompute" else mark.phase
            now = phase if phase in ("optimizer", "evaluation") else f"{phase} {mark.micro_step}"
            if now != label:
                label = labels[mark.at] = now
        stretch = max(1, (len(self.log) - begin) // points)
        alive = dict.fromkeys(PART_NAMES, 0)
        for block in self.alive(begin - 1):
            alive[block.part] += block.bytes
        total = most = sum(alive.values())
        samples, fullest, label = [], dict(alive), ""
        for at in range(begin, len(self.log)):
            entry = self.log[at]
            block = self.blocks[entry if entry >= 0 else ~entry]
            if not block.on_host:
                change = block.bytes if entry >= 0 else -block.bytes
                alive[block.part] += change
                total += change
            label = labels.get(at, label)
            if total > most:
                most, fullest = total, dict(alive)
            if (at - begin) % stretch == 0 or at + 1 in labels or at + 1 == len(self.log):
                samples.append(Sample(label, Parts(**fullest)))
                most, fullest, label = total, dict(alive), ""
        return tuple(samples)

    def events(self, hole: int = 0) -> Iterator[tuple[int, int]]:
        """Births (block, bytes) and deaths (block, -1) on the device, in order, as the allocator simulation takes
        them.

        Args:
            hole: bytes that are taken before all else, and free when the steps begin.
        """
        begin = next((mark.at for mark in self.marks if mark.phase != "load"), 0)
        yield _HOLE, hole
        for at, entry in enumerate(self.log):
            if at == begin:
                yield _HOLE, -1
            number = entry if entry >= 0 else ~entry
            if not self.blocks[number].on_host:
                yield number, self.blocks[number].bytes if entry >= 0 else -1
