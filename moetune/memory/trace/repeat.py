"""The events of a whole model, from the log of one with fewer layers.

Of a group of layers that stands for others (alike.py) the log has one stretch in every forward and one in every
backward pass, between the places where the layer before it and its own last layer end. Each stretch happens once for
each group, and so do the births and deaths of what belongs to the group's layers outside of its stretches: weights,
optimizer states.

Which copy of a storage dies in another stretch than the one it was born in follows from whose it is:

    born and dies in stretches of the group         the same group's
    of a neighbour, dies in the group (its input)   that of the group's own neighbour
    of the group, dies in a neighbour               that of the group next to that neighbour
    of the group, dies elsewhere                    all groups' (gradients, when they are dropped)

Copies of host memory are fetched a layer ahead and freed a layer later: of those of one size the oldest dies first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from moetune.memory.report import PART_NAMES
from moetune.memory.trace.alike import Shortened, Unit
from moetune.memory.trace.log import OUTSIDE, Block, Log, Mark

_NO_LAYER = -1


@dataclass(frozen=True)
class Stretch:
    """Places [start, stop) of a log that belong to the `layer` (the last of its group), or to none.

    Attributes:
        unit: the group that stands for others, if it is one.
        backward: whether groups come in falling order.
    """

    start: int
    stop: int
    layer: int = _NO_LAYER
    unit: Unit | None = None
    backward: bool = False


def stretches(log: Log, kept: Sequence[int], units: Sequence[Unit]) -> list[Stretch]:
    """All of the log of a model of these layers, in order."""
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

    entered: int | None = None  # the layer whose backward has begun
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
    """The layer of each block, and the group that stands for others that the layer is in.

    Attributes:
        born: [blocks] the layer in whose stretch it is born; -1 outside of layers.
        of: [blocks] the layer that it belongs to: as it was noted, or else `born`.
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
        """The group that stands for others which a block is of."""
        return self.units.get(int(self.of[block]))

    @cached_property
    def matches(self) -> dict[tuple[int, int], int]:
        """(a neighbour's block, the last layer of a group) -> the block of the group that is to the next one what this
        is to the group: made in the same way, and freed in a neighbour's stretch."""
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
    """Births and deaths in the whole model, in terms of the blocks of a log. They are the same whatever the bytes.

    Attributes:
        like: [storages] the block that each storage is like, in order of birth.
        copies: [storages] the number of its group among those that the block's group stands for.
        storages: [events] the storage that is born or dies.
        signs: [events] 1 or -1.
        born, died: [storages] its events; `died` is the number of all events if it outlives them.
        marks: each as often as it happens: the event at which it does, and the group and copy that it is of.
    """

    owners: Owners
    like: np.ndarray
    copies: np.ndarray
    storages: np.ndarray
    signs: np.ndarray
    born: np.ndarray
    died: np.ndarray
    marks: list[tuple[int, Mark, Unit | None, int]]

    @classmethod
    def of(cls, log: Log, short: Shortened | None = None) -> Events:
        """The events of a model whose layers those of the log stand for; by default those of the log."""
        units = () if short is None else short.units
        return _Expansion(log, Owners(log, short.kept if short and units else (), units)).events()

    def _of_blocks(self, of: Callable[[Block], Any], dtype: type = bool) -> np.ndarray:
        return np.array([of(block) for block in self.owners.log.blocks], dtype=dtype)[self.like]

    @cached_property
    def on_host(self) -> np.ndarray:
        """[storages]"""
        return self._of_blocks(lambda block: block.on_host)

    @cached_property
    def managed(self) -> np.ndarray:
        """[storages]"""
        return self._of_blocks(lambda block: block.managed)

    @cached_property
    def in_bank(self) -> np.ndarray:
        """[storages]"""
        return self._of_blocks(lambda block: block.in_bank)

    @cached_property
    def loaded(self) -> np.ndarray:
        """[storages] whether it is a weight, there from loading on."""
        return self._of_blocks(
            lambda block: block.phase == "load" and block.part in ("frozen_weights", "trainable_weights")
        )

    @cached_property
    def parts(self) -> np.ndarray:
        """[storages] numbers into `PART_NAMES`."""
        return self._of_blocks(lambda block: PART_NAMES.index(block.part), int)

    def times(self, at: int, block: int | None) -> int:
        """How often something happens that is noted at a place of the log: in a group's stretch once for each group
        that it stands for; elsewhere as often as its block."""
        owners = self.owners
        if not owners.units:
            return 1
        stretch = owners.stretches[owners.stretch_at[min(at, len(owners.stretch_at) - 1)]]
        unit = stretch.unit
        if stretch.layer == _NO_LAYER and block is not None:
            unit = owners.unit_of(block)
        return 1 if unit is None else len(unit.copies)

    def module(self, storage: int) -> str:
        """The path of the module that made a storage."""
        block = int(self.like[storage])
        return named(self.owners.log.blocks[block].module, self.owners.unit_of(block), int(self.copies[storage]))


@cache
def named(module: str, unit: Unit | None, copy: int) -> str:
    """A module's path with the number of the layer that it stands for."""
    if unit is None or copy == 0 or not module:
        return module
    numbers = dict(zip(map(str, unit.layers), map(str, unit.copies[copy]), strict=True))
    return re.sub(r"(?<=\.)\d+(?=\.|$)", lambda m: numbers.get(m[0], m[0]), module, count=1)


class _Expansion:
    """Repeats the stretches of a log. A storage is a pair of a block and a copy.

    Attributes:
        turns: of each stretch as often as it happens: its unit and copy.
        rows: for each turn, [events] the number of the turn, the place in the log, the block and the copy.
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
        for stretch in self.owners.stretches:
            if stretch.unit is None:
                self._outside(stretch)
            else:
                self._copied(stretch, stretch.unit)
        turn, place, block, copy = (np.concatenate(column) for column in zip(*self.rows, strict=True))
        births = self.births[place]
        most = int(copy.max(initial=0)) + 1
        pair = block * most + copy
        # Storages are numbered by their births.
        number = np.full(len(self.log.blocks) * most, -1, dtype=np.int64)
        number[pair[births]] = np.arange(int(births.sum()))
        storages = number[pair]
        self._free_the_oldest(storages, births, block)
        events = np.arange(len(storages))
        first = np.full(int(births.sum()) + 1, len(storages), dtype=np.int64)  # the last one: never born
        first[storages[births]] = events[births]
        # A death counts if it is the first one after the birth.
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
        place = np.arange(stretch.start, stretch.stop)
        block, births = self.blocks[place], self.births[place]
        count, first = self.counts[block], np.zeros(len(place), dtype=np.int64)
        once = ~births & self.fetched[block]
        if stretch.layer != _NO_LAYER:  # a neighbour frees what its own group has passed on to it
            passed = ~births & ~once & (count > 1) & np.isin(block, list(self.owners.matches.values()))
            later = passed & (stretch.layer > self.owners.of[block])
            first[later] = count[later] - 1
            once |= passed
        count = np.where(once, 1, count)
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        self._add(len(self.turns), np.repeat(place, count), np.repeat(block, count), np.repeat(first, count) + within)
        self.turns.append((stretch, 0))

    def _copied(self, stretch: Stretch, unit: Unit) -> None:
        own, last = unit.layers[-1], len(unit.copies) - 1
        place = np.arange(stretch.start, stretch.stop)
        block, births = self.blocks[place], self.births[place]
        of = self.owners.of[block]
        target, beside = block.copy(), np.zeros(len(place), dtype=np.int64)
        of_all = np.zeros(len(place), dtype=bool)  # it dies when the last one is through
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
        """Lets each death of a copy of host memory be that of the oldest one of its size."""
        fetched = np.flatnonzero(self.fetched[block])
        sizes = np.array([self.log.blocks[number].bytes for number in block[fetched].tolist()])
        for size in np.unique(sizes):
            there = fetched[sizes == size]
            deaths = there[~births[there]]
            storages[deaths] = storages[there[births[there]]][: len(deaths)]

    def _marks(self, turn: np.ndarray, place: np.ndarray) -> list[tuple[int, Mark, Unit | None, int]]:
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
