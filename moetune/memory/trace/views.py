"""`Trace`: what a log says: peak, bytes by part, timeline, input of the allocator simulation."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from moetune.errors import UserError
from moetune.memory.allocator import SMALLEST_BLOCK
from moetune.memory.report import (
    ONCE_PHASES,
    PART_NAMES,
    Allocation,
    Collective,
    LoadPeaks,
    Moment,
    PartName,
    Parts,
    Phase,
    Sample,
    Term,
)
from moetune.memory.time.work import Work, WorkPart, sums
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.log import Log
from moetune.memory.trace.repeat import Events, all_turns, layer_named
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.messages import Message

_BEFORE_ALL = -1_000
"""Number, in `Trace.allocations`, of the block that is allocated before everything else."""
# Part of the peak -> the page in docs/concepts that explains it.
_PAGES: dict[PartName, str] = {
    "frozen_weights": "weights",
    "trainable_weights": "weights",
    "gradients": "optimizers",
    "optimizer_states": "optimizers",
    "master_weights": "optimizers",
    "saved_activations": "activations",
    "transient_peak": "activations",
}


@dataclass(frozen=True)
class Trace:
    """All storages of one rank's steps, numbered in order of allocation, with their bytes and lifetimes.

    A place is the index of an event (an allocation or a release); what is alive at a place is what exists once that
    event has happened. Host memory is among the storages, but counts in `host_peak` and `loaded(on_host=True)` only.

    Attributes:
        log: what the tracker recorded of the layers that ran.
        events: allocations and releases in the whole model; shapes [events] and [storages] refer to these.
        bytes: [storages] size of each storage.
        begin: first place that counts for the peak.
        load: peaks while weights are loaded; None if not computed, as for a trace of real steps.
        collectives: bytes that this rank sends in the last step, by kind, axis and phase.
        work: the last step's FLOPs, bytes and launches, by part of the model; empty if they were not counted.
    """

    log: Log
    events: Events
    bytes: np.ndarray
    begin: int = 0
    load: LoadPeaks | None = None
    collectives: tuple[Collective, ...] = ()
    work: Mapping[WorkPart, Work] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        log: Log,
        axis_of: Callable[[Message], str],
        *,
        short: Shortened | None = None,
        turns: Sequence[int] = (),
        left_out: int = 0,
        last_step: bool = False,
    ) -> "Trace":
        """Build the trace of the whole model from a tracker's log.

        Args:
            axis_of: returns the axis of `parallel:` along which a collective communicates.
            short: the layers that ran and those that they stand for; None if all layers ran.
            turns: for each micro-batch of a step in which they take turns, the one that ran that stands for it; empty
                if all ran, or ran one after the other.
            left_out: number of micro-steps of the last step that were not run; each is counted, in collectives and
                work, as another second micro-step.
            last_step: whether only the last step counts for the peak.

        Raises:
            UserError: the last step calls a collective whose bytes are not known.
        """
        log = all_turns(log, turns) if turns else log
        last = max((mark.step for mark in log.marks), default=0)
        for sent in log.sent:
            if sent.step == last and not sent.message.is_known:
                raise UserError(
                    f"cannot count the bytes that ranks send: the collective {sent.message.kind} is not known"
                )
        events = Events.of(log) if short is None else Events.of(log, short.stack.kept, short.stack.like)
        collectives: dict[tuple[str, str, str], list[int]] = {}
        for at, step, micro_step, phase, message, block in log.sent:
            if step == last and message.ranks > 1:
                times = events.times(at, block) * (1 + left_out if micro_step == 1 else 1)
                key = (message.kind, axis_of(message), f"in {phase}")
                collectives.setdefault(key, []).extend([message.bytes] * times)
        of_last = (done for done in log.done if done.step == last)
        done = (record._replace(times=record.times * events.times(record.at, record.block)) for record in of_last)
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
        """Index of the last event."""
        return len(self.events.storages) - 1

    @cached_property
    def _on_host(self) -> np.ndarray:
        """Whether each storage is host memory: [storages]."""
        return self.events.column("on_host").astype(bool)

    def _of_part(self, part: PartName) -> np.ndarray:
        """Return the bytes of each storage of one part on the device, 0 for all others: int64 [storages]."""
        return np.where(self._on_host | (self.events.column("part") != part), 0, self.bytes)

    def _alive(self, bytes_of: np.ndarray) -> np.ndarray:
        """Return the sum of `bytes_of` [storages] over the storages that are alive after each event: int64 [events]."""
        return np.cumsum(self.events.signs * bytes_of[self.events.storages])

    @cached_property
    def device(self) -> np.ndarray:
        """Bytes alive on the device after each event: [events]."""
        return self._alive(np.where(self._on_host, 0, self.bytes))

    def alive(self, at: int | None = None) -> np.ndarray:
        """Return the numbers of the storages that are alive on the device once event `at` has happened; None for the
        peak."""
        at = self.peak if at is None else at
        return np.flatnonzero((self.events.born <= at) & (self.events.died > at) & ~self._on_host)

    # --- Sums ---------------------------------------------------------------------------------------------------

    @cached_property
    def peak(self) -> int:
        """Index of the first event, from `begin` on, after which the most bytes are alive on the device."""
        return self.begin + int(np.argmax(self.device[self.begin :]))

    @cached_property
    def host_peak(self) -> int:
        """The most bytes that are alive in host memory at once, over all steps."""
        return int(np.max(self._alive(np.where(self._on_host, self.bytes, 0)), initial=0))

    @property
    def rounded_peak(self) -> int:
        """The most bytes alive on the device with sizes rounded up to the allocator's 512 bytes, over all steps."""
        rounded = -(-self.bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK
        return int(np.max(self._alive(np.where(self._on_host, 0, rounded)), initial=0))

    def parts(self, at: int | None = None) -> Parts:
        """Return the bytes on the device after event `at`, by part; None for the peak."""
        alive = self.alive(at)
        part, sizes = self.events.column("part")[alive], self.bytes[alive]
        return Parts(*(int(sizes[part == name].sum()) for name in PART_NAMES))

    def by_layer(self) -> tuple[int, ...]:
        """Return the bytes of each decoder layer on the device at the peak, in order, without transient ones; empty if
        the log does not say which layers the storages belong to."""
        alive = self.alive()
        lasting = alive[self.events.column("part")[alive] != "transient_peak"]
        places, count = self.events.layers[lasting] + 1, sum(map(len, self.events.copies))
        return tuple(map(int, np.bincount(places, self.bytes[lasting], minlength=count + 1)[1:]))

    def loaded(self, *, on_host: bool = False, in_bank: bool = False) -> int:
        """Return the bytes of the model's weights and buffers that exist before the first step, on the device or
        `on_host`; `in_bank` counts only the weights of expert banks."""
        column = self.events.column
        is_weight = (column("phase") == "load") & np.isin(column("part"), ("frozen_weights", "trainable_weights"))
        return int(self.bytes[is_weight & (self._on_host == on_host) & (column("in_bank") >= in_bank)].sum())

    @property
    def managed(self) -> int:
        """Bytes of CUDA managed memory, which the driver may move between host and device: paged optimizer states."""
        return int(self.bytes[self.events.column("managed").astype(bool)].sum())

    def workspaces(self, card: Gpu | None) -> list[int]:
        """Return the bytes of each cuBLAS workspace: of two if there is a backward pass, which runs in a thread of its
        own, else of one; of none if tensors are only loaded, or on a CPU (None)."""
        phases = {mark.phase for mark in self.log.marks}
        threads = 2 if "backward" in phases else int(phases > {"load"} or "load" not in phases)
        return [] if card is None else [card.cublas_workspace.value] * threads

    # --- Views --------------------------------------------------------------------------------------------------

    def moment(self, largest: int = 20) -> Moment:
        """Return step, phase and module of the peak, and the storages that are alive then. Storages of the same part,
        module, phase and operation are summed; `largest` is the number of sums to return, largest first."""
        _, mark, number, layer = self.events.marks[
            bisect_right(self.events.marks, self.peak, key=lambda mark: mark[0]) - 1
        ]
        groups: dict[tuple[PartName, str, Phase, str], list[int]] = {}
        for storage in self.alive().tolist() if largest else ():
            block = self.log.blocks[self.events.like[storage]]
            key = block.part, self.events.module(storage), block.phase, block.op
            groups.setdefault(key, []).append(int(self.bytes[storage]))
        allocations = [Allocation(*key, len(sizes), sum(sizes)) for key, sizes in groups.items()]
        allocations.sort(key=lambda allocation: -allocation.bytes)
        module = layer_named(mark.module, number, layer)
        return Moment(mark.step, mark.micro_step, mark.phase, module, tuple(allocations[:largest]))

    def terms(self) -> list[Term]:
        """Return the lines that explain the peak, largest first; within a part they sum to that part.

        Storages form a line if they belong to the same part and were made by the same operation in the same kind of
        module, in any layer.
        """
        lines: dict[tuple[PartName, str], list[int]] = {}
        alive = self.alive()
        for number, size in zip(self.events.like[alive].tolist(), self.bytes[alive].tolist(), strict=True):
            block = self.log.blocks[number]
            kind = re.sub(r"(?:^|.*\.)\d+\.?", "", block.module)  # the path without what comes up to the layer's number
            label = ": ".join(filter(None, (kind, block.op))) or "of all layers"
            lines.setdefault((block.part, label), []).append(size)
        terms = (
            Term(part, name, f"{len(sizes):,} storages", sum(sizes), f"concepts/{_PAGES[part]}.md")
            for (part, name), sizes in lines.items()
        )
        return sorted((term for term in terms if term.bytes), key=lambda term: -term.bytes)

    def phases(self) -> tuple[tuple[Phase, int], ...]:
        """Return (phase, most bytes alive on the device in it) for each phase, in the order in which they begin, of the
        steps whose peak counts.

        Loading is left out, and recomputation counts as the backward pass.
        """
        most: dict[Phase, int] = {}
        marks = [(at, mark.phase) for at, mark, *_ in self.events.marks if at >= self.begin and mark.phase != "load"]
        starts = [next(same) for _, same in groupby(marks, key=lambda mark: mark[1])]
        ends = [*(at for at, _ in starts[1:]), self.end + 1]
        for (at, phase), until in zip(starts, ends, strict=True):
            phase = "backward" if phase == "recompute" else phase
            alive = self.device[max(0, at - 1) : until]  # what is alive when the phase begins counts
            most[phase] = max(most.get(phase, 0), int(alive.max(initial=0)))
        return tuple(most.items())

    def timeline(self, points: int = 600) -> tuple[Sample, ...]:
        """Return about `points` samples of the last step's bytes by part, each the fullest moment of its section of the
        step. The sample with which a phase begins is labelled, such as "forward 0"; others have an empty label."""
        marks = self.events.marks
        begin = next(at for at, mark, *_ in marks if mark.step == marks[-1][1].step)
        labels: dict[int, str] = {}
        label = ""
        for at, mark, *_ in marks:
            phase = "backward" if mark.phase == "recompute" else mark.phase
            now = phase if phase in ONCE_PHASES else f"{phase} {mark.micro_step}"
            if at >= begin and now != label:
                label = labels[at] = now
        stretch = max(1, (self.end + 1 - begin) // points)
        # Sections have equal lengths but for the starts of phases; the moment before a section counts as part of it.
        regular = range(begin + 1, self.end + 1, stretch)
        starts = sorted({begin, *regular, *(at for at in labels if at <= self.end)})
        alive = np.concatenate([[0], self.device])  # alive[n]: bytes before event n
        fullest = [start + int(np.argmax(alive[start : stop + 1])) for start, stop in pairwise((*starts, self.end + 1))]
        parts = [np.concatenate([[0], self._alive(self._of_part(part))])[fullest] for part in PART_NAMES]
        return tuple(
            Sample(labels.get(start, ""), Parts(*map(int, sizes)))
            for start, sizes in zip(starts, np.stack(parts, 1), strict=True)
        )

    def allocations(self, before: int = 0, sizes: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
        """Yield (storage, bytes) for each allocation on the device and (storage, -1) for each release, in order: the
        input of the allocator simulation (memory/allocator.py).

        A block of `before` bytes is allocated before everything else and freed when the first step begins, which leaves
        a hole of that size, as loading may. Of other storages only those of `sizes`, (from, to) bytes, are yielded;
        None: all.
        """
        events, begin = self.events, next((at for at, mark, *_ in self.events.marks if mark.phase != "load"), 0)
        low, high = sizes or (0, np.iinfo(np.int64).max)
        chosen = ~self._on_host & (self.bytes >= low) & (self.bytes <= high)
        there = np.flatnonzero(chosen[events.storages])
        storages = events.storages[there]
        amounts = np.where(events.signs[there] > 0, self.bytes[storages], -1)
        loading = int(np.searchsorted(there, begin))
        yield _BEFORE_ALL, before
        yield from zip(storages[:loading].tolist(), amounts[:loading].tolist(), strict=True)
        yield _BEFORE_ALL, -1
        yield from zip(storages[loading:].tolist(), amounts[loading:].tolist(), strict=True)
