"""What can be read off the recorded storages of a run's first steps: peak, parts, timeline, the allocator's events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from moetune.errors import UserError
from moetune.memory.allocator import SMALLEST_BLOCK, WORKSPACES
from moetune.memory.report import PART_NAMES, Allocation, Collective, LoadPeaks, Moment, PartName, Parts, Phase, Sample
from moetune.memory.time.work import Work, WorkPart, sums
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.log import Block, Log, Mark
from moetune.memory.trace.repeat import Events, named
from moetune.parallel.messages import Message

_BEFORE_ALL = -1_000
"""In place of a storage's number: bytes that the allocator gives out before all else."""


@dataclass(frozen=True)
class Trace:
    """The storages of the first steps, in order of birth, with their bytes.

    Memory of the host is among the storages; it counts in `host_peak` only. A place is the number of an event; what is
    alive at it, is alive after it.

    Attributes:
        log: what was recorded.
        events: births and deaths of all layers, in terms of the log.
        bytes: [storages]
        begin: the place from which on the peak counts.
        load: the peaks before the first step; None for a trace of real steps.
        collectives: what leaves this rank in the last step, by the phase in which it does.
        work: what a step does on the GPU, by part; empty where it was not counted.
        formula: of a closed form: by block its bytes, as a product of `sizes`.
        sizes: what the formulas were evaluated at.
    """

    log: Log
    events: Events
    bytes: np.ndarray
    begin: int = 0
    load: LoadPeaks | None = None
    collectives: tuple[Collective, ...] = ()
    work: Mapping[WorkPart, Work] = field(default_factory=dict)
    formula: Callable[[int], str] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        log: Log,
        axis_of: Callable[[Message], str],
        *,
        short: Shortened | None = None,
        left_out: int = 0,
        last_step: bool = False,
    ) -> Trace:
        """Reads a tracker's log.

        Args:
            axis_of: the axis along which a message goes.
            short: what the layers of a shortened model stand for.
            left_out: micro-steps of a step like its second one, which were not run.
            last_step: only the last step's peak counts.

        Raises:
            UserError: the bytes of a message are not known.
        """
        last = max((mark.step for mark in log.marks), default=0)
        for sent in log.sent:
            if sent.step == last and not sent.message.is_known:
                raise UserError(
                    f"what ranks send cannot be counted: {sent.message.kind} is no collective that the count knows"
                )
        events = Events.of(log, short)
        collectives: dict[tuple[str, str, str], list[int]] = {}
        for at, step, micro_step, phase, message, block in log.sent:
            if step == last and message.ranks > 1:
                times = events.times(at, block) * (1 + left_out if micro_step == 1 else 1)
                key = (message.kind, axis_of(message), f"in {phase}")
                collectives.setdefault(key, []).extend([message.bytes] * times)
        done = (one._replace(times=events.times(one.at, one.block)) for one in log.done if one.step == last)
        begin = next(at for at, mark, *_ in events.marks if mark.step == last) if last_step else 0
        return cls(
            log,
            events,
            np.array([block.bytes for block in log.blocks], dtype=np.int64)[events.like],
            begin,
            collectives=tuple(Collective(*key, len(sizes), sum(sizes)) for key, sizes in collectives.items()),  # type: ignore[arg-type]
            work=sums(done, left_out),
        )

    # --- Storages -----------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """The place after which nothing happens."""
        return len(self.events.storages) - 1

    @property
    def marks(self) -> list[Mark]:
        """Where phases and modules begin, at places."""
        return [
            replace(mark, at=at, module=named(mark.module, unit, copy)) for at, mark, unit, copy in self.events.marks
        ]

    @property
    def blocks(self) -> list[Block]:
        """Each storage by itself, births and deaths at places."""
        return [self._block(storage) for storage in range(len(self.bytes))]

    def _block(self, storage: int) -> Block:
        events = self.events
        like = self.log.blocks[events.like[storage]]
        died = int(events.died[storage])
        return replace(
            like,
            bytes=int(self.bytes[storage]),
            module=events.module(storage),
            born=int(events.born[storage]),
            died=died if died <= self.end else None,
        )

    def _alive(self, bytes_of: np.ndarray) -> np.ndarray:
        """[events] bytes that are alive at each place, of storages that take these."""
        return np.cumsum(self.events.signs * bytes_of[self.events.storages])

    @cached_property
    def _device(self) -> np.ndarray:
        """[events]"""
        return self._alive(np.where(self.events.on_host, 0, self.bytes))

    def alive(self, at: int | None = None) -> np.ndarray:
        """The numbers of the storages that are alive on the device at a place; by default at the peak."""
        at = self.peak if at is None else at
        return np.flatnonzero((self.events.born <= at) & (self.events.died > at) & ~self.events.on_host)

    # --- Sums ---------------------------------------------------------------------------------------------------

    @cached_property
    def peak(self) -> int:
        """The place at which the most is alive on the device."""
        return self.begin + int(np.argmax(self._device[self.begin :]))

    @cached_property
    def host_peak(self) -> int:
        """The most bytes that are on the host at once."""
        return int(np.max(self._alive(np.where(self.events.on_host, self.bytes, 0)), initial=0))

    @property
    def rounded_peak(self) -> int:
        """The most that is alive at once where each size is rounded up as the allocator does, wherever that is."""
        rounded = -(-self.bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK
        return int(np.max(self._alive(np.where(self.events.on_host, 0, rounded)), initial=0))

    def parts(self, at: int | None = None) -> Parts:
        """The bytes alive at a place, by part; by default at the peak."""
        alive = self.alive(at)
        taken = np.bincount(self.events.parts[alive], self.bytes[alive], len(PART_NAMES))  # exact below 2^53
        return Parts(*map(int, taken))

    def loaded(self, *, on_host: bool = False, in_bank: bool = False) -> int:
        """The bytes of weights, which are there from loading on.

        Args:
            in_bank: of expert banks alone.
        """
        events = self.events
        of_banks = events.in_bank if in_bank else True
        return int(self.bytes[events.loaded & of_banks & (events.on_host == on_host)].sum())

    @property
    def managed(self) -> int:
        """The bytes of memory that the driver may have on either side; it stays."""
        return int(self.bytes[self.events.managed].sum())

    @property
    def workspaces(self) -> int:
        """cuBLAS's: one of each thread that multiplies, of which autograd has its own for backward passes."""
        return WORKSPACES if any(mark.phase == "backward" for mark in self.log.marks) else 1

    def most(self, part: PartName) -> int:
        """The most bytes of a part that are alive at once on the device."""
        taken = np.where(self.events.on_host | (self.events.parts != PART_NAMES.index(part)), 0, self.bytes)
        return int(np.max(self._alive(taken), initial=0))

    # --- Views --------------------------------------------------------------------------------------------------

    def moment(self, largest: int = 20) -> Moment:
        """When the peak is, and the largest allocations then, those of one module, phase and operation together."""
        _, mark, unit, copy = self.events.marks[bisect_right(self.events.marks, self.peak, key=lambda one: one[0]) - 1]
        groups: dict[tuple[PartName, str, Phase, str], list[int]] = {}
        for storage in self.alive().tolist() if largest else ():
            block = self.log.blocks[self.events.like[storage]]
            key = block.part, self.events.module(storage), block.phase, block.op
            groups.setdefault(key, []).append(int(self.bytes[storage]))
        allocations = [Allocation(*key, len(sizes), sum(sizes)) for key, sizes in groups.items()]
        allocations.sort(key=lambda allocation: -allocation.bytes)
        module = named(mark.module, unit, copy)
        return Moment(mark.step, mark.micro_step, mark.phase, module, tuple(allocations[:largest]))

    def timeline(self, points: int = 600) -> tuple[Sample, ...]:
        """The last step in about so many samples, each the fullest moment of its stretch; phases are labelled."""
        marks = self.events.marks
        begin = next(at for at, mark, *_ in marks if mark.step == marks[-1][1].step)
        labels: dict[int, str] = {}
        label = ""
        for at, mark, *_ in marks:
            phase = "backward" if mark.phase == "recompute" else mark.phase
            now = phase if phase in ("optimizer", "evaluation") else f"{phase} {mark.micro_step}"
            if at >= begin and now != label:
                label = labels[at] = now
        stretch = max(1, (self.end + 1 - begin) // points)
        # A sample begins after every stretch, and where a phase does; what is alive before it counts too.
        regular = range(begin + 1, self.end + 1, stretch)
        starts = sorted({begin, *regular, *(at for at in labels if at <= self.end)})
        alive = np.concatenate([[0], self._device])  # at place - 1
        fullest = [start + int(np.argmax(alive[start : stop + 1])) for start, stop in pairwise((*starts, self.end + 1))]
        events, parts = self.events, []
        for part in range(len(PART_NAMES)):
            taken = np.where(events.on_host | (events.parts != part), 0, self.bytes)
            parts.append(np.concatenate([[0], self._alive(taken)])[fullest])
        return tuple(
            Sample(labels.get(start, ""), Parts(*map(int, sizes)))
            for start, sizes in zip(starts, np.stack(parts, 1), strict=True)
        )

    def allocations(self, before: int = 0) -> Iterator[tuple[int, int]]:
        """Births (storage, bytes) and deaths (storage, -1) on the device, in order, as the allocator takes them.

        Args:
            before: bytes that are taken before all else, and free when the steps begin.
        """
        begin = next((at for at, mark, *_ in self.events.marks if mark.phase != "load"), 0)
        yield _BEFORE_ALL, before
        on_host, sizes = self.events.on_host.tolist(), self.bytes.tolist()
        events = zip(self.events.storages.tolist(), self.events.signs.tolist(), strict=True)
        for at, (storage, sign) in enumerate(events):
            if at == begin:
                yield _BEFORE_ALL, -1
            if not on_host[storage]:
                yield storage, sizes[storage] if sign > 0 else -1
