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
from dataclasses import dataclass, replace

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
    return _Writer(log, short).write() if short.units else log


class Owners:
    """Whose a block is: of which layer, and if that one's group stands for others, of which group."""

    def __init__(self, log: Log, short: Shortened) -> None:
        self.stretches = stretches(log, short)
        self.units = {layer: unit for unit in short.units for layer in unit.layers}
        ends = {layer: unit.layers[-1] for unit in short.units for layer in unit.layers}
        self.of: list[int | None] = [None if b.layer is None else ends.get(b.layer, b.layer) for b in log.blocks]
        births = [block.born for block in log.blocks]
        for stretch in self.stretches:
            if stretch.layer is None:
                continue
            for number in range(bisect_left(births, stretch.start), bisect_left(births, stretch.stop)):
                if self.of[number] is None:
                    self.of[number] = stretch.layer

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
            for layer, kinds in left.items():
                for key, blocks in kinds.items():
                    others = [number for number, end in blocks if end == group]
                    if layer != group:
                        found |= {
                            (other, group): own for (own, _), other in zip(left[group][key], others, strict=False)
                        }
        return found


class _Writer:
    def __init__(self, log: Log, short: Shortened) -> None:
        self.log, self.owners = log, Owners(log, short)
        self.match = self.owners.matches(log)
        self.passed_on = set(self.match.values())
        self.out = Log()
        self.numbers: dict[tuple[int, int], int] = {}  # (block, copy) -> its number in the new log
        self.renamed: dict[tuple[str, int, int], str] = {}
        self.fetched: dict[int, deque[int]] = defaultdict(deque)  # by bytes, the copies from the host that are there

    def write(self) -> Log:
        for stretch in self.owners.stretches:
            if stretch.unit is None:
                self._outside(stretch)
            else:
                copies = range(len(stretch.unit.copies))
                for copy in reversed(copies) if stretch.backward else copies:
                    self._copy(stretch, stretch.unit, copy)
        self._done()
        return self.out

    def _done(self) -> None:
        """What is done in a group's stretches is done for each that it stands for; elsewhere what is done to its
        tensors, as by optimizers."""
        starts = [stretch.start for stretch in self.owners.stretches]
        for done in self.log.done:
            stretch = self.owners.stretches[bisect_right(starts, done.at) - 1]
            unit = stretch.unit
            if stretch.layer is None and done.block is not None:
                unit = self._unit_of(done.block)
            self.out.done.append(done if unit is None else done._replace(times=len(unit.copies)))

    def _outside(self, stretch: Stretch) -> None:
        log, out = self.log, self.out
        marks = iter(self._marks(stretch))
        mark = next(marks, None)
        for at in range(stretch.start, stretch.stop):
            while mark is not None and mark.at == at:
                out.marks.append(replace(mark, at=len(out.entries)))
                mark = next(marks, None)
            entry = log.entries[at]
            number = entry if entry >= 0 else ~entry
            unit = self._unit_of(number)
            if entry < 0 and log.blocks[number].fetched:
                self._let_go(number)
                continue
            if unit is None:
                self._birth(number, 0) if entry >= 0 else self._death(number, 0)
                continue
            copies: Sequence[int] = range(len(unit.copies))
            if entry < 0 and stretch.layer is not None and number in self.passed_on:  # a neighbour is through with it
                copies = copies[-1:] if stretch.layer > unit.layers[-1] else copies[:1]
            for copy in copies:
                self._birth(number, copy, unit) if entry >= 0 else self._death(number, copy)
        for sent in self._sent(stretch):
            unit = None if sent.block is None else self._unit_of(sent.block)
            out.sent += [sent._replace(at=len(out.entries))] * (1 if unit is None else len(unit.copies))

    def _copy(self, stretch: Stretch, unit: Unit, copy: int) -> None:
        log, out, own = self.log, self.out, unit.layers[-1]
        begin, last = len(out.entries), len(unit.copies) - 1
        is_last = copy == (0 if stretch.backward else last)
        marks = self._marks(stretch)
        next_mark = 0
        for at in range(stretch.start, stretch.stop):
            while next_mark < len(marks) and marks[next_mark].at <= at:
                mark = marks[next_mark]
                out.marks.append(replace(mark, at=len(out.entries), module=self._named(mark.module, unit, copy)))
                next_mark += 1
            entry = log.entries[at]
            if entry >= 0:
                self._birth(entry, copy, unit)
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
        out.sent += [sent._replace(at=begin) for sent in self._sent(stretch)]

    def _unit_of(self, number: int) -> Unit | None:
        layer = self.owners.of[number]
        return None if layer is None else self.owners.units.get(layer)

    def _birth(self, number: int, copy: int, unit: Unit | None = None) -> None:
        block, out = self.log.blocks[number], self.out
        module = block.module if unit is None else self._named(block.module, unit, copy)
        new = replace(block, born=len(out.entries), died=None, module=module)
        if block.fetched:
            self.fetched[block.bytes].append(len(out.blocks))
        else:
            self.numbers[number, copy] = len(out.blocks)
        out.blocks.append(new)
        out.entries.append(len(out.blocks) - 1)

    def _death(self, number: int, copy: int) -> None:
        if (new := self.numbers.pop((number, copy), None)) is not None:
            self._gone(new)

    def _let_go(self, number: int) -> None:
        self._gone(self.fetched[self.log.blocks[number].bytes].popleft())

    def _gone(self, new: int) -> None:
        self.out.blocks[new].died = len(self.out.entries)
        self.out.entries.append(~new)

    def _marks(self, stretch: Stretch) -> list[Mark]:
        return [mark for mark in self.log.marks if stretch.start <= mark.at < stretch.stop]

    def _sent(self, stretch: Stretch) -> Iterator[Sent]:
        return (sent for sent in self.log.sent if stretch.start <= sent.at < stretch.stop)

    def _named(self, module: str, unit: Unit, copy: int) -> str:
        """A module's path with the number of the layer that it stands for."""
        if copy == 0 or not module:
            return module
        key = (module, copy, unit.layers[-1])
        if key not in self.renamed:
            numbers = dict(zip(map(str, unit.layers), map(str, unit.copies[copy]), strict=True))
            self.renamed[key] = re.sub(r"(?<=\.)\d+(?=\.|$)", lambda m: numbers.get(m[0], m[0]), module, count=1)
        return self.renamed[key]
