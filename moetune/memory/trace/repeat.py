"""Expansion of a shortened model's log into the allocations and releases of the whole model.

alike.py chooses groups of layers that stand for identical groups. Such a group has one stretch of the log in every
forward and every backward pass: from the end of the layer before the group to the end of the group's last layer. The
expansion repeats each stretch once for every group that it stands for, in descending order in backward. Storages of the
group's layers that are allocated outside of the stretches, such as weights and optimizer states, are repeated as often.

A copy is a group's number in `Unit.copies`. A storage that is allocated in one stretch and freed in another is matched
by the layers of both:

    allocated            freed                            the release frees
    in the group         in the group                     the storage of the same copy
    in a neighbour       in the group (a layer's input)   for each copy, the storage of the layer beside that copy
    in the group         in a neighbour                   the storage of the copy beside that neighbour
    in the group         elsewhere                        the storages of all copies (gradients, at the step's end)

Device copies of host tensors are fetched one layer ahead and freed one layer later, so they are matched by age: of
equal size, the oldest is freed first.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from moetune.memory.trace.alike import Shortened, Unit
from moetune.memory.trace.log import OUTSIDE, Log, Mark

_NO_LAYER = -1


@dataclass(frozen=True)
class Stretch:
    """A section of a log, `Log.entries[start:stop]`, that lies inside one layer or group of layers, or outside of all
    layers.

    Attributes:
        layer: number of the layer, of a group its last layer's; -1 outside of layers.
        unit: the group, if this is the stretch of a group that stands for others; else None.
        backward: whether the stretch is part of a backward pass, in which groups are repeated in descending order.
    """

    start: int
    stop: int
    layer: int = _NO_LAYER
    unit: Unit | None = None
    backward: bool = False


def stretches(log: Log, kept: Sequence[int], units: Sequence[Unit]) -> list[Stretch]:
    """Divide a whole log into stretches, in order and without gaps. `kept` are the numbers of the decoder layers that
    ran, ascending (none: one stretch); `units` the groups among them that stand for others."""
    ends = {unit.layers[-1]: unit for unit in units}
    inside = {layer for unit in units for layer in unit.layers[:-1]}
    before = {unit.layers[-1]: kept[kept.index(unit.layers[0]) - 1] for unit in units}
    found: list[Stretch] = []
    at = 0

    def close(stop: int, layer: int = _NO_LAYER, unit: Unit | None = None, backward: bool = False) -> None:
        nonlocal at
        if stop > at:
            found.append(Stretch(at, stop, layer, unit, backward))
        at = stop

    entered: int | None = None  # the layer whose backward pass is running
    for cut in log.cuts if kept else ():
        if cut.layer in inside:
            continue
        if cut.layer == OUTSIDE:
            close(cut.at, _NO_LAYER if entered is None else entered, backward=entered is not None)
            entered = None
        elif not cut.backward:
            stop = cut.at
            if cut.layer == kept[-1]:  # the model frees the last layer's input after that layer has ended
                while log.entries[stop] < 0:
                    stop += 1
            close(stop, cut.layer, ends.get(cut.layer))
        elif entered is None:
            entered = cut.layer
            close(cut.at)
        else:
            close(cut.at, entered, ends.get(entered) if cut.layer == before.get(entered) else None, True)
            entered = cut.layer
    close(len(log.entries))
    return found


class Owners:
    """Assigns each block of a log to a decoder layer, and through that to a group that stands for others.

    A layer inside a group is counted as the group's last layer. `kept` are the numbers of the decoder layers that ran,
    ascending; `units` the groups among them that stand for others.

    Attributes:
        stretches: the stretches of the log, in order.
        units: layer number -> group, for the layers of the groups.
        stretch_at: [entries] index in `stretches` of each entry of the log.
        born: [blocks] layer in whose stretch the block was allocated; -1 outside of layers.
        of: [blocks] layer that the block belongs to: `Block.layer` where it is set, else `born`.
        died: by block, layer in whose stretch the block was freed; -1 outside of layers and if never freed.
    """

    def __init__(self, log: Log, kept: Sequence[int], units: Sequence[Unit] = ()) -> None:
        self.log, self.stretches = log, stretches(log, kept, units)
        self.units = {layer: unit for unit in units for layer in unit.layers}
        ends = {layer: unit.layers[-1] for layer, unit in self.units.items()}
        self.stretch_at = np.repeat(np.arange(len(self.stretches)), [one.stop - one.start for one in self.stretches])
        layers = np.array([one.layer for one in self.stretches], dtype=np.int64)[self.stretch_at]
        self.born = layers[[block.born for block in log.blocks]]
        self.of = np.array(
            [
                born if block.layer is None else ends.get(block.layer, block.layer)
                for born, block in zip(self.born.tolist(), log.blocks, strict=True)
            ],
            dtype=np.int64,
        )
        self.died = [_NO_LAYER if block.died is None else int(layers[block.died]) for block in log.blocks]

    def unit_of(self, block: int) -> Unit | None:
        """Return the group that the block with this number belongs to; None if its layer stands only for itself."""
        return self.units.get(int(self.of[block]))

    @cached_property
    def matches(self) -> dict[tuple[int, int], int]:
        """For each block that a neighbouring layer allocates and a group frees, the group's own block in the same role.

        Maps (neighbour's block, last layer of the group) -> own block. The group allocates its own block, and the next
        layer in the same direction frees it; both blocks have one size and are allocated in the same kind of pass.
        """
        left: dict[int, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
        groups = {unit.layers[-1] for unit in self.units.values()}
        for number, (layer, end) in enumerate(zip(self.of.tolist(), self.died, strict=True)):
            if layer != end and _NO_LAYER not in (layer, end) and (layer in groups or end in groups):
                block = self.log.blocks[number]
                start = self.stretches[self.stretch_at[block.born]]
                left[layer][start.backward, block.bytes, block.on_host, block.fetched, end > layer].append(number)
        found: dict[tuple[int, int], int] = {}
        for group in groups:
            for layer, kinds in list(left.items()):
                for key, blocks in kinds.items():
                    others = [number for number in blocks if self.died[number] == group]
                    if layer != group:
                        found |= {(other, group): own for own, other in zip(left[group][key], others, strict=False)}
        return found


@dataclass(frozen=True)
class Events:
    """Allocations and releases of all storages of a whole model, in order of time, without their bytes.

    Storages are numbered in the order of their allocation, and each refers to the block of the log that describes it.

    Attributes:
        owners: layers of the log's blocks; `owners.log` is the log.
        like: [storages] number of the block that describes the storage.
        copies: [storages] index in `Unit.copies` of the storage's group; 0 if its layer stands only for itself.
        storages: [events] number of the storage that is allocated or freed.
        signs: [events] 1 for an allocation, -1 for a release.
        born, died: [storages] index of the event that allocates, and that frees, the storage; the number of events if
            it is never freed.
        marks: (event, mark, group, copy) for each start of a phase or module, in order. `event` is the index of the
            first event after the start; `group` is None outside of groups that stand for others.
    """

    owners: Owners
    like: np.ndarray
    copies: np.ndarray
    storages: np.ndarray
    signs: np.ndarray
    born: np.ndarray
    died: np.ndarray
    marks: list[tuple[int, Mark, Unit | None, int]]
    _columns: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Log, short: Shortened | None = None) -> "Events":
        """Expand a log into the events of the whole model. `short` has the decoder layers that ran and the groups that
        stand for others; None if all layers ran, and then the events are the entries of the log."""
        units = () if short is None else short.units
        return _Expansion(log, Owners(log, short.kept if short and units else (), units)).events()

    def column(self, name: str) -> np.ndarray:
        """Return an attribute of `Block` for every storage: [storages]. The array is cached; do not modify it."""
        if name not in self._columns:
            self._columns[name] = np.array([getattr(block, name) for block in self.owners.log.blocks])[self.like]
        return self._columns[name]

    def times(self, at: int, block: int | None) -> int:
        """Return how often an operation or message, recorded once at `Log.entries[at]`, happens in the whole model.

        In the stretch of a group that stands for others, it happens once for each group in `Unit.copies`. Outside of
        layers it happens that often if it concerns a block of such a group (None: no block). Everywhere else: once.
        """
        owners = self.owners
        if not owners.units:
            return 1
        stretch = owners.stretches[owners.stretch_at[min(at, len(owners.stretch_at) - 1)]]
        unit = stretch.unit
        if stretch.layer == _NO_LAYER and block is not None:
            unit = owners.unit_of(block)
        return 1 if unit is None else len(unit.copies)

    def module(self, storage: int) -> str:
        """Return the path, in the whole model, of the module that allocated a storage; empty if there was none."""
        block = int(self.like[storage])
        return layer_named(self.owners.log.blocks[block].module, self.owners.unit_of(block), int(self.copies[storage]))


@cache
def layer_named(module: str, unit: Unit | None, copy: int) -> str:
    """Return the path of a module in the given copy of a group: its layer's number becomes that of the copy's layer.

    With `unit.layers` (1,) and `unit.copies[copy]` (5,), "model.layers.1.mlp" becomes "model.layers.5.mlp". Without a
    group (`unit` None) the path is unchanged.
    """
    if unit is None or copy == 0 or not module:
        return module
    numbers = dict(zip(map(str, unit.layers), map(str, unit.copies[copy]), strict=True))
    return re.sub(r"(?<=\.)\d+(?=\.|$)", lambda m: numbers.get(m[0], m[0]), module, count=1)


class _Expansion:
    """Repeats the stretches of a log for the groups that stand for others. A storage is a pair (block, copy).

    Attributes:
        births: [entries] whether an entry of the log is an allocation.
        blocks: [entries] number of the block that is allocated or freed.
        counts: [blocks] number of groups that the block's group stands for, itself included.
        turns: (stretch, copy) for each repetition of a stretch, in order of time.
        rows: for each repetition four arrays [events]: its index in `turns`, index in `Log.entries`, block, copy.
    """

    def __init__(self, log: Log, owners: Owners) -> None:
        self.log, self.owners = log, owners
        entries = np.array(log.entries, dtype=np.int64)
        self.births = entries >= 0
        self.blocks = np.where(self.births, entries, ~entries)
        self.counts = np.ones(len(log.blocks), dtype=np.int64)
        for unit in owners.units.values():
            self.counts[owners.of == unit.layers[-1]] = len(unit.copies)
        self.fetched = np.array([block.fetched for block in log.blocks], dtype=bool)
        self.turns: list[tuple[Stretch, int]] = []
        self.rows: list[tuple[np.ndarray, ...]] = [(np.arange(0),) * 4]

    def events(self) -> Events:
        """Return the events of the whole model."""
        for stretch in self.owners.stretches:
            if stretch.unit is None:
                self._outside(stretch)
            else:
                self._copied(stretch, stretch.unit)
        turn, place, block, copy = (np.concatenate(column) for column in zip(*self.rows, strict=True))
        births = self.births[place]
        most = int(copy.max(initial=0)) + 1
        pair = block * most + copy
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
        like = self.blocks[place[keep]][births]
        return Events(self.owners, like, copy[keep][births], storages, np.where(births, 1, -1), born, died, marks)

    def _add(self, turn: int | np.ndarray, place: np.ndarray, block: np.ndarray, copy: np.ndarray) -> None:
        self.rows.append((np.broadcast_to(turn, place.shape), place, block, copy))

    def _outside(self, stretch: Stretch) -> None:
        """Add a stretch of no repeated group to `rows` once; repeat only its entries of such groups' blocks."""
        place = np.arange(stretch.start, stretch.stop)
        block, births = self.blocks[place], self.births[place]
        count, first = self.counts[block], np.zeros(len(place), dtype=np.int64)
        once = ~births & self.fetched[block]
        if stretch.layer != _NO_LAYER:  # a neighbour frees only the storage of the copy next to it
            passed = ~births & ~once & (count > 1) & np.isin(block, list(self.owners.matches.values()))
            later = passed & (stretch.layer > self.owners.of[block])
            first[later] = count[later] - 1
            once |= passed
        count = np.where(once, 1, count)
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        self._add(len(self.turns), np.repeat(place, count), np.repeat(block, count), np.repeat(first, count) + within)
        self.turns.append((stretch, 0))

    def _copied(self, stretch: Stretch, unit: Unit) -> None:
        """Add a group's stretch to `rows` once for each group that it stands for, in descending order in backward."""
        own, last = unit.layers[-1], len(unit.copies) - 1
        place = np.arange(stretch.start, stretch.stop)
        block, births = self.blocks[place], self.births[place]
        of = self.owners.of[block]
        target, beside = block.copy(), np.zeros(len(place), dtype=np.int64)
        of_all = np.zeros(len(place), dtype=bool)  # freed only when the last copy has run
        for at in np.flatnonzero(~births & ~self.fetched[block] & (of != own)).tolist():
            same = None if of[at] == _NO_LAYER else self.owners.matches.get((int(block[at]), own))
            if same is None:
                of_all[at] = True
            else:
                target[at], beside[at] = same, -1 if of[at] < own else 1
        for copy in range(last, -1, -1) if stretch.backward else range(last + 1):
            copies = copy + beside
            neighbours = (copies < 0) | (copies > last)
            is_last = copy == (0 if stretch.backward else last)
            keep = ~of_all | is_last
            blocks = np.where(neighbours, block, target)
            self._add(len(self.turns), place[keep], blocks[keep], np.where(neighbours | of_all, 0, copies)[keep])
            self.turns.append((stretch, copy))

    def _free_the_oldest(self, storages: np.ndarray, births: np.ndarray, block: np.ndarray) -> None:
        """Change `storages` [events] in place so that of fetched storages of equal size the oldest is freed first.

        For each event, `births` is whether it is an allocation, and `block` the number of the storage's block.
        """
        fetched = np.flatnonzero(self.fetched[block])
        sizes = np.array([self.log.blocks[number].bytes for number in block[fetched].tolist()])
        for size in np.unique(sizes):
            there = fetched[sizes == size]
            deaths = there[~births[there]]
            storages[deaths] = storages[there[births[there]]][: len(deaths)]

    def _marks(self, turn: np.ndarray, place: np.ndarray) -> list[tuple[int, Mark, Unit | None, int]]:
        """Return (event, mark, group, copy) for each start of a phase or module, in order, as `Events.marks` has them.

        For each event of the whole model, `turn` and `place` are the indices in `turns` and in `Log.entries` of the
        repetition and the entry that it comes from.
        """
        length, of_stretch = len(self.log.entries), defaultdict[int, list[Mark]](list)
        for mark in self.log.marks:
            if mark.at < length:
                of_stretch[self.owners.stretch_at[mark.at]].append(mark)
        numbers = {stretch.start: number for number, stretch in enumerate(self.owners.stretches)}
        found = [
            (happens * length + mark.at, mark, stretch.unit, copy)
            for happens, (stretch, copy) in enumerate(self.turns)
            for mark in of_stretch.get(numbers[stretch.start], ())
        ]
        found += [(len(self.turns) * length, mark, None, 0) for mark in self.log.marks if mark.at >= length]
        events = np.searchsorted(turn * length + place, [one[0] for one in found]).tolist()
        return [(event, *one[1:]) for event, one in zip(events, found, strict=True)]
