"""The log of a shortened model becomes that of the whole one.

Of a group of layers that stands for others (alike.py) the log has one stretch in every forward and one in every
backward pass, between the places where the layer before it and its own last layer end. Each stretch is written down
once for each group, and so is what belongs to the group's layers but is born outside of its stretches: weights,
optimizer states.

What dies in another stretch than it was born in is found by whose it is:

    born and dies in stretches of the group         the same group's
    of a neighbour, dies in the group (its input)   that of the group's own neighbour
    of the group, dies in a neighbour               that of the group next to that neighbour
    of the group, dies elsewhere                    all groups' (gradients, when they are dropped)

Copies of what waits on the host are fetched a layer ahead and let go a layer later: of those that are alike the oldest
goes first.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from moetune.memory.trace.alike import Shortened, Unit
from moetune.memory.trace.log import OUTSIDE, Log, Mark, Sent


@dataclass(frozen=True)
class Stretch:
    """Places [start, stop) of a log that belong to the `layer` (the last of its group), or to none.

    Attributes:
        unit: the group that stands for others, if it is one.
        backward: whether groups come in falling order.
    """

    start: int
    stop: int
    layer: int | None = None
    unit: Unit | None = None
    backward: bool = False


def stretches(log: Log, short: Shortened) -> list[Stretch]:
    """All of the log, in order."""
    ends = {unit.layers[-1]: unit for unit in short.units}
    inside = {layer for unit in short.units for layer in unit.layers[:-1]}
    before = {unit.layers[-1]: short.kept[short.kept.index(unit.layers[0]) - 1] for unit in short.units}
    found: list[Stretch] = []
    at = 0

    def close(stop: int, layer: int | None = None, unit: Unit | None = None, backward: bool = False) -> None:
        nonlocal at
        if stop > at:
            found.append(Stretch(at, stop, layer, unit, backward))
        at = stop

    entered: int | None = None  # the layer whose backward has begun
    for cut in log.cuts:
        if cut.layer in inside:
            continue
        if cut.layer == OUTSIDE:
            close(cut.at, entered, backward=entered is not None)
            entered = None
        elif not cut.backward:
            stop = cut.at
            if cut.layer == short.kept[-1]:  # the model lets go of the last layer's input after that layer has ended
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


def repeat(log: Log, short: Shortened) -> Log:
    """The log with every group that stands for others written down as often as it stands for."""
    if not short.units:
        return log
    order = Order.of(log, short)
    owners, out = order.owners, Log(entries=order.entries)
    for number, copy in zip(order.blocks, order.copies, strict=True):
        block = log.blocks[number]
        out.blocks.append(replace(block, died=None, module=_named(block.module, owners.unit_of(number), copy)))
    for at, entry in enumerate(out.entries):
        if entry >= 0:
            out.blocks[entry].born = at
        else:
            out.blocks[~entry].died = at
    out.marks = [replace(mark, at=at, module=_named(mark.module, unit, copy)) for mark, at, unit, copy in order.marks]
    out.sent = [sent._replace(at=at) for sent, at in order.sent]
    starts = [stretch.start for stretch in owners.stretches]
    for done in log.done:
        # In a group's stretches: once for each group that it stands for. Elsewhere: as its tensors, as by optimizers.
        stretch = owners.stretches[bisect_right(starts, done.at) - 1]
        unit = stretch.unit
        if stretch.layer is None and done.block is not None:
            unit = owners.unit_of(done.block)
        out.done.append(done if unit is None else done._replace(times=len(unit.copies)))
    return out


@cache
def _named(module: str, unit: Unit | None, copy: int) -> str:
    """A module's path with the number of the layer that it stands for."""
    if unit is None or copy == 0 or not module:
        return module
    numbers = dict(zip(map(str, unit.layers), map(str, unit.copies[copy]), strict=True))
    return re.sub(r"(?<=\.)\d+(?=\.|$)", lambda m: numbers.get(m[0], m[0]), module, count=1)


class Owners:
    """Whose a block is: of which layer, and if that one's group stands for others, of which group.

    Attributes:
        born: the layer in whose stretch it is born; None outside of layers.
        of: the layer that it belongs to: one that it was said to be of, or that in whose stretch it is born.
    """

    def __init__(self, log: Log, short: Shortened) -> None:
        self.stretches = stretches(log, short)
        self.units = {layer: unit for unit in short.units for layer in unit.layers}
        ends = {layer: unit.layers[-1] for unit in short.units for layer in unit.layers}
        self.born: list[int | None] = [None] * len(log.blocks)
        births = [block.born for block in log.blocks]
        for stretch in self.stretches:
            if stretch.layer is None:
                continue
            for number in range(bisect_left(births, stretch.start), bisect_left(births, stretch.stop)):
                self.born[number] = stretch.layer
        self.of = [
            born if block.layer is None else ends.get(block.layer, block.layer)
            for born, block in zip(self.born, log.blocks, strict=True)
        ]

    def matches(self, log: Log) -> dict[tuple[int, int], int]:
        """(a neighbour's block, the last layer of a group) -> the block of the group that is to the next one what this
        is to the group: made in the same way, and gone in a neighbour's stretch."""
        left: dict[int, dict[tuple, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        places = [stretch.start for stretch in self.stretches]
        for number, block in enumerate(log.blocks):
            layer = self.of[number]
            if layer is None or block.died is None:
                continue
            end = self.stretches[bisect_left(places, block.died + 1) - 1].layer
            if end is not None and end != layer:
                start = self.stretches[bisect_left(places, block.born + 1) - 1]
                key = (start.backward, block.bytes, block.on_host, block.fetched, end > layer)
                left[layer][key].append((number, end))
        found: dict[tuple[int, int], int] = {}
        for group in {unit.layers[-1] for unit in self.units.values()}:
            for layer, kinds in list(left.items()):
                for key, blocks in kinds.items():
                    others = [number for number, end in blocks if end == group]
                    if layer != group:
                        found |= {
                            (other, group): own for (own, _), other in zip(left[group][key], others, strict=False)
                        }
        return found

    def unit_of(self, number: int) -> Unit | None:
        """The group that stands for others which a block is of."""
        layer = self.of[number]
        return None if layer is None else self.units.get(layer)


@dataclass
class Order:
    """What happens in the whole model, in terms of the shortened model's log. It is the same whatever the bytes.

    Attributes:
        blocks, copies: of each storage the block that it is like, and the number of its group among those that the
            block's stands for.
        entries: births and deaths of these, as in `Log`.
        marks, sent: each as often as it happens, and where in `entries`.
    """

    owners: Owners
    blocks: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    marks: list[tuple[Mark, int, Unit | None, int]] = field(default_factory=list)
    sent: list[tuple[Sent, int]] = field(default_factory=list)

    @classmethod
    def of(cls, log: Log, short: Shortened) -> Order:
        """The order of a log; that of a model with all its layers is the log's own."""
        return _Writer(log, short).write()


class _Writer:
    def __init__(self, log: Log, short: Shortened) -> None:
        self.log, self.owners = log, Owners(log, short)
        self.match = self.owners.matches(log)
        self.passed_on = set(self.match.values())
        self.out = Order(self.owners)
        self.numbers: list[dict[int, int]] = [{} for _ in log.blocks]  # of each block: copy -> number of the storage
        self.fetched: dict[int, deque[int]] = defaultdict(deque)  # by bytes, the copies from the host that are there

    def write(self) -> Order:
        for stretch in self.owners.stretches:
            if stretch.unit is None:
                self._outside(stretch)
            else:
                copies = range(len(stretch.unit.copies))
                for copy in reversed(copies) if stretch.backward else copies:
                    self._copy(stretch, stretch.unit, copy)
        return self.out

    def _outside(self, stretch: Stretch) -> None:
        log, out = self.log, self.out
        marks = iter(self._marks(stretch))
        mark = next(marks, None)
        for at in range(stretch.start, stretch.stop):
            while mark is not None and mark.at == at:
                out.marks.append((mark, len(out.entries), None, 0))
                mark = next(marks, None)
            entry = log.entries[at]
            number = entry if entry >= 0 else ~entry
            if entry < 0 and log.blocks[number].fetched:
                self._let_go(number)
                continue
            unit = self.owners.unit_of(number)
            copies: Sequence[int] = range(1 if unit is None else len(unit.copies))
            if unit is not None and entry < 0 and stretch.layer is not None and number in self.passed_on:
                # a neighbour is through with it
                copies = copies[-1:] if stretch.layer > unit.layers[-1] else copies[:1]
            for copy in copies:
                self._birth(number, copy) if entry >= 0 else self._death(number, copy)
        for sent in self._sent(stretch):
            unit = None if sent.block is None else self.owners.unit_of(sent.block)
            out.sent += [(sent, len(out.entries))] * (1 if unit is None else len(unit.copies))

    def _copy(self, stretch: Stretch, unit: Unit, copy: int) -> None:
        log, out, own = self.log, self.out, unit.layers[-1]
        begin, last = len(out.entries), len(unit.copies) - 1
        is_last = copy == (0 if stretch.backward else last)
        marks = self._marks(stretch)
        next_mark = 0
        for at in range(stretch.start, stretch.stop):
            while next_mark < len(marks) and marks[next_mark].at <= at:
                out.marks.append((marks[next_mark], len(out.entries), unit, copy))
                next_mark += 1
            entry = log.entries[at]
            if entry >= 0:
                self._birth(entry, copy)
                continue
            number = ~entry
            owner = self.owners.of[number]
            if log.blocks[number].fetched:
                self._let_go(number)
            elif owner == own:
                self._death(number, copy)
            elif owner is None or (same := self.match.get((number, own))) is None:
                if is_last:  # of all layers: it is gone when the last one is through
                    self._death(number, 0)
            else:  # the neighbour's, or that of the copy which stands there
                beside = copy - 1 if owner < own else copy + 1
                self._death(same, beside) if 0 <= beside <= last else self._death(number, 0)
        out.sent += [(sent, begin) for sent in self._sent(stretch)]

    def _birth(self, number: int, copy: int) -> None:
        block, out = self.log.blocks[number], self.out
        if block.fetched:
            self.fetched[block.bytes].append(len(out.blocks))
        else:
            self.numbers[number][copy] = len(out.blocks)
        out.entries.append(len(out.blocks))
        out.blocks.append(number)
        out.copies.append(copy)

    def _death(self, number: int, copy: int) -> None:
        if (new := self.numbers[number].pop(copy, None)) is not None:
            self.out.entries.append(~new)

    def _let_go(self, number: int) -> None:
        self.out.entries.append(~self.fetched[self.log.blocks[number].bytes].popleft())

    def _marks(self, stretch: Stretch) -> list[Mark]:
        return [mark for mark in self.log.marks if stretch.start <= mark.at < stretch.stop]

    def _sent(self, stretch: Stretch) -> Iterator[Sent]:
        return (sent for sent in self.log.sent if stretch.start <= sent.at < stretch.stop)
