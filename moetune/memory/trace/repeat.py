"""Expansion of a shortened model's log into that of the whole model.

Each decoder layer that ran has one stretch of the log in every forward and every backward pass: from the end of the
layer before it to its own end. The expansion writes one stretch for each layer of the whole model, that of the layer
that stands for it (alike.py), in descending order in backward. Storages of a layer that are allocated outside of the
stretches, such as weights and optimizer states, are repeated for each layer that it stands for.

A storage of the whole model is a pair of a block of the log and a layer of the whole model. Which one a release frees
follows from the layers that ran:

    allocated in           freed in                its release, written for layer i, frees
    the layer              the layer               the storage of layer i
    a neighbour            the layer               the storage of the layer beside i, in the same role as the block
    elsewhere              the layer               all storages of the block, when the layer's last copy is written
    the layer              outside of all layers   all storages of the block (gradients, at the step's end)

The layer beside i may have another stand-in than the neighbour that ran. It has the neighbour's kind, so it has a block
in the same role: allocated and freed in the same passes, by the same operation, as far from its own layer. Without one
the storage counts as allocated elsewhere.

Device copies of host tensors are fetched one layer ahead and freed one layer later, so they are matched by age: of
equal size, the oldest is freed first.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from moetune.memory.trace.log import OUTSIDE, Log, Mark, Turn


@dataclass(frozen=True)
class Stretch:
    """A section of a log, `Log.entries[start:stop]`, that lies inside one layer or outside of all layers.

    Attributes:
        layer: the layer, as an index in the layers that ran; -1 outside of layers.
        number: of a layer's stretch, the number of its pass over the layers, counted from 0 through the log.
        backward: whether the pass is a backward pass, in which the layers are in descending order.
    """

    start: int
    stop: int
    layer: int = OUTSIDE
    number: int = 0
    backward: bool = False


def stretches(log: Log, kept: Sequence[int]) -> list[Stretch]:
    """Divide a whole log into stretches, in order and without gaps. `kept` are the numbers, in the log, of the decoder
    layers that ran, ascending (none: one stretch)."""
    place = {layer: index for index, layer in enumerate(kept)}
    divided: list[Stretch] = []
    at, number = 0, -1

    def close(stop: int, layer: int = OUTSIDE, backward: bool = False) -> None:
        nonlocal at, number
        if stop > at:
            before = divided[-1] if divided else Stretch(0, 0)
            turn = layer - before.layer if not backward else before.layer - layer
            if layer != OUTSIDE and (before.layer == OUTSIDE or before.backward is not backward or turn <= 0):
                number += 1
            divided.append(Stretch(at, stop, layer, number, backward))
        at = stop

    entered: int | None = None  # the layer whose backward pass is running
    for cut in log.cuts if kept else ():
        layer = OUTSIDE if cut.layer == OUTSIDE else place[cut.layer]
        if layer == OUTSIDE:
            close(cut.at, OUTSIDE if entered is None else entered, backward=entered is not None)
            entered = None
        elif not cut.backward:
            stop = cut.at
            if layer == len(kept) - 1:  # the model frees the last layer's input after that layer has ended
                while log.entries[stop] < 0:
                    stop += 1
            close(stop, layer)
        else:
            close(cut.at, OUTSIDE if entered is None else entered, backward=entered is not None)
            entered = layer
    close(len(log.entries))
    return divided


def stretches_of_turns(log: Log) -> list[Stretch]:
    """Divide a whole log into turns of micro-batches, in order and without gaps: stretches whose `layer` is the number
    of a micro-batch. A pass over the micro-batches ends where the order of their turns changes."""
    passes: list[list[tuple[int, int, int]]] = [[]]  # (start, stop, micro-batch), all ascending or all descending
    starts = [Turn(0, OUTSIDE), *log.turns, Turn(len(log.entries), OUTSIDE)]
    for (start, number), (stop, _) in pairwise(starts):
        before = passes[-1][-1][2] if passes[-1] else OUTSIDE
        if start == stop:
            continue
        if before == number and passes[-1]:
            passes[-1][-1] = passes[-1][-1][0], stop, number
        elif OUTSIDE in (before, number) or (
            len(passes[-1]) > 1 and (passes[-1][0][2] < before) is not (before < number)
        ):
            passes.append([(start, stop, number)])
        else:
            passes[-1].append((start, stop, number))
    return [
        Stretch(start, stop, number, place, backward=own[0][2] > own[-1][2])
        for place, own in enumerate(passes)
        for start, stop, number in own
    ]


class Owners:
    """Assigns each block of a log to a decoder layer. Layers are indices in the layers that ran.

    Args:
        kept: the numbers, in the log, of the decoder layers that ran, ascending.
        turns: assign each block to a micro-batch instead, by the turn in which it was allocated.

    Attributes:
        stretches: the stretches of the log, in order.
        stretch_at: [entries] index in `stretches` of each entry of the log.
        born: [blocks] layer in whose stretch the block was allocated; -1 outside of layers.
        of: [blocks] layer that the block belongs to: that of `Block.layer` where it is set, else `born`.
    """

    def __init__(self, log: Log, kept: Sequence[int], *, turns: bool = False) -> None:
        self.log, self.are_turns = log, turns
        self.stretches = stretches_of_turns(log) if turns else stretches(log, kept)
        lengths = [stretch.stop - stretch.start for stretch in self.stretches]
        self.stretch_at = np.repeat(np.arange(len(lengths)), lengths)
        layers = np.array([stretch.layer for stretch in self.stretches], dtype=np.int64)[self.stretch_at]
        born, died = log.lifetimes()
        self._born, self._died = born, died
        self.born = layers[born]
        self._ended = layers[np.where(died < 0, born, died)]
        self.of = self.born.copy()
        if turns:  # what micro-batches add up to is allocated once
            gradients = np.array([block.part == "gradients" for block in log.blocks], dtype=bool)
            self.of[gradients & ((died < 0) | (self._ended == OUTSIDE))] = OUTSIDE
        elif kept:
            place = {layer: index for index, layer in enumerate(kept)}
            for number, block in enumerate(log.blocks):
                if block.layer is not None:
                    self.of[number] = place[block.layer]

    @cached_property
    def _roles(self) -> tuple[dict[int, tuple[Hashable, int]], dict[tuple[int, Hashable, int], int]]:
        """Return, for the blocks that are allocated or freed outside of their layer, block -> (role, how many blocks of
        the same layer have the role before); and (layer, role, that number) -> block."""
        seen = Counter[tuple[int, Hashable]]()
        roles: dict[int, tuple[Hashable, int]] = {}
        in_role: dict[tuple[int, Hashable, int], int] = {}
        stretch_at = self.stretch_at.tolist()

        def where(at: int, layer: int) -> Hashable:
            """Describe where in the log the entry with this index is, seen from a layer: the pass and the distance of
            its layer, or the stretch outside of layers; None if there is no entry (-1)."""
            if at < 0:
                return None
            stretch = self.stretches[stretch_at[at]]
            return ("outside", stretch_at[at]) if stretch.layer == OUTSIDE else (stretch.number, stretch.layer - layer)

        for number in np.flatnonzero((self.born != self.of) | (self._ended != self.of)).tolist():
            block, layer = self.log.blocks[number], int(self.of[number])
            when = where(int(self._born[number]), layer), where(int(self._died[number]), layer)
            role = (*when, block.op, block.bytes, block.on_host, block.fetched)
            before = seen[layer, role]
            seen[layer, role] = before + 1
            roles[number] = role, before
            in_role[layer, role, before] = number
        return roles, in_role

    def alike(self, block: int, layer: int) -> int | None:
        """Return the block of `layer` in the role that `block` has in its own layer; None if there is none."""
        roles, in_role = self._roles
        return in_role.get((layer, *roles[block]))


@dataclass(frozen=True)
class Events:
    """Allocations and releases of all storages of a whole model, in order of time, without their bytes.

    Storages are numbered in the order of their allocation, and each refers to the block of the log that describes it.

    Attributes:
        owners: layers of the log's blocks; `owners.log` is the log.
        kept: numbers, in the log, of the decoder layers that ran.
        copies: [layers that ran] the layers of the whole model that each stands for, ascending.
        like: [storages] number of the block that describes the storage.
        layers: [storages] layer of the whole model that the storage belongs to; -1 if it belongs to none.
        storages: [events] number of the storage that is allocated or freed.
        signs: [events] 1 for an allocation, -1 for a release.
        born, died: [storages] index of the event that allocates, and that frees, the storage; the number of events if
            it is never freed.
        marks: (event, mark, number, layer) for each start of a phase or module, in order. `event` is the index of the
            first event after the start; `number` the layer's number in the log and `layer` that in the whole model,
            both -1 outside of layers.
        at: [entries + 1] for each entry of the log, and for its end, index of the first event that repeats it or what
            comes after it; empty unless micro-batches take turns.
    """

    owners: Owners
    kept: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    like: np.ndarray
    layers: np.ndarray
    storages: np.ndarray
    signs: np.ndarray
    born: np.ndarray
    died: np.ndarray
    marks: list[tuple[int, Mark, int, int]]
    at: np.ndarray
    _columns: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Log, kept: Sequence[int] = (), like: Sequence[int] = (), *, turns: bool = False) -> "Events":
        """Expand a log into the events of the whole model.

        Args:
            log: the log of the layers that ran.
            kept: the numbers of these layers in the log, ascending. Without any, the events are the entries of the log.
            like: for each layer of the whole model, the index in `kept` of the layer that stands for it.
            turns: expand micro-batches that take turns into all of a step; `kept` and `like` are their numbers.
        """
        copies = tuple(tuple(layer for layer, index in enumerate(like) if index == own) for own in range(len(kept)))
        return _Expansion(log, Owners(log, kept, turns=turns), tuple(kept), copies, like).events()

    def column(self, name: str) -> np.ndarray:
        """Return an attribute of `Block` for every storage: [storages]. The array is cached; do not modify it."""
        if name not in self._columns:
            self._columns[name] = np.array([getattr(block, name) for block in self.owners.log.blocks])[self.like]
        return self._columns[name]

    def times(self, at: int, block: int | None) -> int:
        """Return how often an operation or message, recorded once at `Log.entries[at]`, happens in the whole model.

        In the stretch of a layer, it happens once for each layer that this one stands for. Outside of layers it happens
        that often if it concerns a block of such a layer (None: no block), else once.
        """
        owners = self.owners
        layer = owners.stretches[owners.stretch_at[min(at, len(owners.stretch_at) - 1)]].layer
        if layer == OUTSIDE and block is not None:
            layer = int(owners.of[block])
        return 1 if layer == OUTSIDE else len(self.copies[layer])

    def module(self, storage: int) -> str:
        """Return the path, in the whole model, of the module that allocated a storage; empty if there was none."""
        block = int(self.like[storage])
        layer = int(self.owners.of[block])
        return layer_named(
            self.owners.log.blocks[block].module, OUTSIDE if layer < 0 else self.kept[layer], int(self.layers[storage])
        )


def all_turns(log: Log, like: Sequence[int]) -> Log:
    """Return the log of a step of which all micro-batches take turns, from the log of those that ran.

    For each micro-batch of the step, `like` is the number of the one that ran that stands for it.
    """
    events = Events.of(log, range(max(like) + 1), like, turns=True)
    at, count = events.at.tolist(), Counter[int | None]((OUTSIDE, None, *like))
    blocks, storages = np.unique(events.like, return_index=True)
    first = dict(zip(blocks.tolist(), storages.tolist(), strict=True))

    def moved(record: Any) -> Any:
        block = None if record.block is None else first[record.block]
        return record._replace(at=at[record.at], block=block)

    return Log(
        [log.blocks[own] for own in events.like.tolist()],
        np.where(events.signs > 0, events.storages, ~events.storages).tolist(),
        [replace(mark, at=event) for event, mark, *_ in events.marks],
        [cut._replace(at=at[cut.at]) for cut in log.cuts],
        sent=[moved(sent) for sent in log.sent for _ in range(count[sent.micro_step])],
        done=[moved(done)._replace(times=done.times * count[done.micro_step]) for done in log.done],
    )


@cache
def layer_named(module: str, number: int, layer: int) -> str:
    """Return the path of a module with the number of its decoder layer, `number`, replaced by another, `layer`. Nothing
    changes where `layer` is -1."""
    if layer == OUTSIDE or number == layer or not module:
        return module
    return re.sub(rf"(?<=\.){number}(?=\.|$)", str(layer), module, count=1)


class _Expansion:
    """Writes a stretch of the log for each layer of the whole model. A storage is a pair (block, layer).

    Attributes:
        births: [entries] whether an entry of the log is an allocation.
        blocks: [entries] number of the block that is allocated or freed.
        turns: (stretch, layer of the whole model; -1 outside) for each stretch that is written, in order of time.
        rows: for each of these four arrays [events]: its index in `turns`, index in `Log.entries`, block, layer.
    """

    def __init__(
        self,
        log: Log,
        owners: Owners,
        kept: tuple[int, ...],
        copies: tuple[tuple[int, ...], ...],
        like: Sequence[int],
    ) -> None:
        self.log, self.owners, self.kept, self.copies, self.like = log, owners, kept, copies, like
        entries = np.array(log.entries, dtype=np.int64)
        self.births = entries >= 0
        self.blocks = np.where(self.births, entries, ~entries)
        self.fetched = np.array([block.fetched for block in log.blocks], dtype=bool)
        self.turns: list[tuple[Stretch, int]] = []
        self.rows: list[tuple[np.ndarray, ...]] = [(np.arange(0),) * 4]

    def events(self) -> Events:
        """Return the events of the whole model."""

        def pass_of(stretch: Stretch) -> int | None:
            return None if stretch.layer == OUTSIDE else stretch.number

        for in_pass, of_pass in groupby(self.owners.stretches, pass_of):
            if in_pass is None:
                for stretch in of_pass:
                    self._outside(stretch)
            else:
                self._pass({stretch.layer: stretch for stretch in of_pass})
        turn, place, block, layer = (np.concatenate(column) for column in zip(*self.rows, strict=True))
        births = self.births[place]
        most = len(self.like) + 1
        pair = block * most + layer + 1
        # Storages are numbered in the order of their allocation.
        number = np.full(len(self.log.blocks) * most, -1, dtype=np.int64)
        number[pair[births]] = np.arange(int(births.sum()))
        storages = number[pair]
        self._free_the_oldest(storages, births, block)
        events = np.arange(len(storages))
        first = np.full(int(births.sum()) + 1, len(storages), dtype=np.int64)  # last element: for storage -1
        first[storages[births]] = events[births]
        # Of several releases of a storage only the first one after its allocation counts.
        deaths = events[~births & (first[storages] < events)]
        _, kept = np.unique(storages[deaths], return_index=True)
        keep = births.copy()
        keep[deaths[kept]] = True
        marks = self._marks(turn[keep], place[keep])
        storages, births, events = storages[keep], births[keep], np.arange(int(keep.sum()))
        born, died = (np.full(len(first) - 1, len(events), dtype=np.int64) for _ in range(2))
        born[storages[births]], died[storages[~births]] = events[births], events[~births]
        like, layers = block[keep][births], layer[keep][births]
        signs = np.where(births, 1, -1)
        at = np.arange(0)
        if self.owners.are_turns:
            at = np.searchsorted((turn * len(self.log.entries) + place)[keep], self._first_of_each())
        return Events(self.owners, self.kept, self.copies, like, layers, storages, signs, born, died, marks, at)

    def _first_of_each(self) -> np.ndarray:
        """Return [entries + 1] turn · entries + place of the first repetition of each entry of the log, and of its
        end."""
        length = len(self.log.entries)
        turns = {stretch.start: at for at, (stretch, _) in reversed([*enumerate(self.turns)])}
        first = np.array([turns[stretch.start] for stretch in self.owners.stretches], dtype=np.int64)
        return np.append(first[self.owners.stretch_at] * length + np.arange(length), len(self.turns) * length)

    def _add(self, turn: int | np.ndarray, place: np.ndarray, block: np.ndarray, layer: np.ndarray) -> None:
        self.rows.append((np.broadcast_to(turn, place.shape), place, block, layer))

    def _outside(self, stretch: Stretch) -> None:
        """Add a stretch outside of layers to `rows` once; repeat only its entries of a layer's blocks, for each layer
        that it stands for."""
        place = np.arange(stretch.start, stretch.stop)
        self._add(len(self.turns), *self._of_all(place, once=~self.births[place] & self.fetched[self.blocks[place]]))
        self.turns.append((stretch, OUTSIDE))

    def _of_all(self, place: np.ndarray, once: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the entries at `place`, each for every layer that its block's layer stands for, as arrays: index in
        `Log.entries`, block, layer of the whole model (-1: the block's layer is none). Entries that are marked in
        `once` are not repeated."""
        block = self.blocks[place]
        table = [np.array(layers) for layers in self.copies] + [np.array([OUTSIDE])]  # the last is that of layer -1
        of = self.owners.of[block]
        layers = [table[layer][:1] if once is not None and once[at] else table[layer] for at, layer in enumerate(of)]
        count = [len(those) for those in layers]
        return np.repeat(place, count), np.repeat(block, count), np.concatenate([*layers, np.arange(0)])

    def _pass(self, of_layers: dict[int, Stretch]) -> None:
        """Add a pass over the layers to `rows`, given the stretch of each layer that ran: for each layer of the whole
        model that of its stand-in, in descending order in backward."""
        order = [layer for layer, own in enumerate(self.like) if own in of_layers]
        if next(iter(of_layers.values())).backward:
            order.reverse()
        first, last = ({self.like[layer]: layer for layer in those} for those in (order[::-1], order))
        for layer in order:
            own = self.like[layer]
            stretch = of_layers[own]
            place = np.arange(stretch.start, stretch.stop)
            block, of = self.blocks[place], np.full(len(place), layer)
            distance = np.where(self.fetched[block], 0, self.owners.of[block] - own)
            far = (self.owners.of[block] == OUTSIDE) & ~self.fetched[block] | (abs(distance) > 1)
            for at in np.flatnonzero(~far & (distance != 0)).tolist():
                of[at] += distance[at]
                same = self.owners.alike(int(block[at]), self.like[of[at]])
                far[at] = same is None
                block[at] = same or 0
            rows = place[~far], block[~far], of[~far]
            # what all share is allocated with the first copy; all else is written with the last
            shared = self.births[place] & (self.owners.of[block] == OUTSIDE)
            if (written := far & np.where(shared, layer == first[own], layer == last[own])).any():
                columns = [np.concatenate(both) for both in zip(rows, self._of_all(place[written]), strict=True)]
                in_order = np.argsort(columns[0], kind="stable")
                rows = columns[0][in_order], columns[1][in_order], columns[2][in_order]
            self._add(len(self.turns), *rows)
            self.turns.append((stretch, layer))

    def _free_the_oldest(self, storages: np.ndarray, births: np.ndarray, block: np.ndarray) -> None:
        """Change `storages` [events] in place so that of fetched storages of equal size the oldest is freed first.

        For each event, `births` is whether it is an allocation, and `block` the number of the storage's block.
        """
        fetched = np.flatnonzero(self.fetched[block])
        sizes = np.array([self.log.blocks[number].bytes for number in block[fetched].tolist()])
        for size in np.unique(sizes):
            there = fetched[sizes == size]
            made, deaths = there[births[there]], there[~births[there]]
            assert len(deaths) <= len(made), "the layers that ran free more copies than all layers fetch"
            storages[deaths] = storages[made][: len(deaths)]

    def _marks(self, turn: np.ndarray, place: np.ndarray) -> list[tuple[int, Mark, int, int]]:
        """Return (event, mark, number, layer) for each start of a phase or module, in order (`Events.marks`).

        For each event of the whole model, `turn` and `place` are the indices in `turns` and in `Log.entries` of the
        repetition and the entry that it comes from.
        """
        length, of_stretch = len(self.log.entries), defaultdict[int, list[Mark]](list)
        for mark in self.log.marks:
            if mark.at < length:
                of_stretch[self.owners.stretch_at[mark.at]].append(mark)
        numbers = {stretch.start: number for number, stretch in enumerate(self.owners.stretches)}
        marks = [
            (happens * length + mark.at, mark, stretch.layer, layer)
            for happens, (stretch, layer) in enumerate(self.turns)
            for mark in of_stretch.get(numbers[stretch.start], ())
        ]
        marks += [(len(self.turns) * length, mark, OUTSIDE, OUTSIDE) for mark in self.log.marks if mark.at >= length]
        events = np.searchsorted(turn * length + place, [when for when, *_ in marks]).tolist()
        return [
            (event, mark, OUTSIDE if own == OUTSIDE else self.kept[own], layer)
            for event, (_, mark, own, layer) in zip(events, marks, strict=True)
        ]
