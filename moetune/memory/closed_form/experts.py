"""Derive the record for any number of trained experts in a layer from one record, as depth.py does for layers.

A step's allocations repeat once for each trained expert (weights, gradients, optimizer states), or once for each group
of experts that are computed together. A record with few trained experts is rewritten for another number: entries of its
second trained expert are repeated for all further ones, and each new group is a copy of a recorded group of its kind.
Sizes that are proportional to a number of experts are scaled.

Which sizes are proportional is not assumed. Steps with two numbers of trained experts are recorded (`banks.probes_of`);
the first record, rewritten for the second number, must equal the second record (`Choices.of`). If it does not, because
of the code of a model or an optimizer, each number of experts needs a record of its own.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from moetune.experts.context import Kind
from moetune.memory.closed_form.banks import Bank
from moetune.memory.closed_form.record import Record
from moetune.memory.trace.log import Block, Log


class Unlike(Exception):
    """Raised when a record cannot be rewritten for another number of trained experts."""


Scale = tuple[str, int]
"""(name, constant): a storage's bytes, less the constant, are proportional to a number of experts: to those of the
storage's group if the name is "group", else to the entry of `Bank.sizes` with it. ("", 0): to none."""


@dataclass(frozen=True)
class Choices:
    """A record from which records with other numbers of trained experts are derived.

    Attributes:
        record: the recorded step.
        banks: the bank of each layer that ran; None for layers without experts.
        scales: [blocks] the number of experts to which each block's bytes are proportional, less a constant.
    """

    record: Record
    banks: tuple[Bank | None, ...]
    scales: tuple[Scale, ...]

    @classmethod
    def of(cls, one: Record, banks: Sequence[Bank | None], other: Record, others: Sequence[Bank | None]) -> "Choices":
        """Find which bytes grow with the number of experts by comparing the records `one` and `other`.

        `banks` and `others` are the banks of their layers. Raises `Unlike` if `one`, rewritten for `others`, does not
        equal `other`.
        """
        possible: list[list[Scale] | None] = [None] * len(one.log.blocks)
        for record, its in ((one, banks), (other, others)):
            rewritten = _Rewriting(one, banks, its)
            _refuse_other_entries(one, rewritten, record)
            for new, number in zip(_lasting(rewritten.log), _lasting(record.log), strict=True):
                source, sizes = rewritten.sources[new], rewritten.sizes[new]
                now, then = int(one.coefficients[source]), int(record.coefficients[number])
                before = possible[source]
                if before is None:
                    before = possible[source] = [("", 0), *((name, 0) for name in sizes)]
                possible[source] = [scale for scale in before if _scaled(now, scale, sizes) == then] or _with_constant(
                    one, source, now, then, sizes, record is other
                )
                if not possible[source]:
                    block = one.log.blocks[source]
                    raise Unlike(f"{block.op} in {block.module!r}: {now:,} and {then:,} bytes")
        return cls(one, tuple(banks), tuple((found or [("", 0)])[0] for found in possible))

    def at(self, banks: Sequence[Bank | None]) -> Record:
        """Return the record of a step with other numbers of trained experts, those of `banks`, one for each layer that
        ran (None without experts). Raises `Unlike` if the code path is not recorded."""
        rewritten, one = _Rewriting(self.record, self.banks, banks), self.record
        source = np.array(rewritten.sources, dtype=np.int64)
        coefficients = np.array(
            [
                _scaled(int(one.coefficients[block]), self.scales[block], sizes)
                for block, sizes in zip(rewritten.sources, rewritten.sizes, strict=True)
            ],
            dtype=np.int64,
        )
        for block, now, then in zip(rewritten.log.blocks, one.coefficients[source].tolist(), coefficients, strict=True):
            block.bytes = block.bytes * int(then) // now if now else 0  # tells storages of equal size from others
        grows = one.experts[source] >= 0
        groups = list(dict.fromkeys(block.experts for block in rewritten.log.blocks if block.experts))
        of_group = {group: number for number, group in enumerate(groups)}
        return replace(
            one,
            log=rewritten.log,
            coefficients=coefficients,
            monomials=one.monomials[source],
            experts=np.array(
                [
                    of_group[block.experts] if is_product else -1
                    for block, is_product in zip(rewritten.log.blocks, grows, strict=True)
                ],
                dtype=np.int64,
            ),
            layers=one.layers[source],
            places=one.places[source],
            groups=tuple(groups),
        )


Counts = dict[str, tuple[int, int]]
"""Name of a number of experts -> its value in the record and in the step that it is rewritten for."""


def _scaled(bytes_: int, scale: Scale, sizes: Counts) -> int | None:
    """Scale recorded bytes to the new number of experts; None if each recorded expert has no whole number of them."""
    name, constant = scale
    if not name:
        return bytes_
    was, now = sizes[name]
    return None if (bytes_ - constant) % was else constant + (bytes_ - constant) // was * now


_LITTLE = 1 << 20
"""Most bytes of a storage of which a part may be constant. Two records cannot show that the rest is proportional, so
only small storages are assumed to be."""


def _with_constant(one: Record, source: int, now: int, then: int, sizes: Counts, differs: bool) -> list[Scale]:
    """Return, as a list of one, the scale of a small storage that takes a constant plus bytes for each trained expert,
    such as the stacked norms of all gradients; an empty list for other storages.

    Args:
        one: the record in which the storage is the block `source`.
        now, then: the storage's coefficient in `one`, and in the record that `one` is compared with.
        sizes: the numbers of experts in these two records.
        differs: False if `one` is compared with itself.
    """
    was, becomes = sizes.get("trained", (0, 0))
    if not differs or now > _LITTLE or one.powers[one.monomials[source]] or (then - now) % (becomes - was or 1):
        return []
    return [("trained", now - (then - now) // (becomes - was) * was)] if becomes != was else []


def _refuse_other_entries(one: Record, rewritten: "_Rewriting", record: Record) -> None:
    """Raise `Unlike` if `rewritten`, which is `one` rewritten for the banks of `record`, differs from `record` in its
    allocations and releases, apart from their bytes."""

    def alike(record: Record, log: Log, source: Callable[[int], int]) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        order = {number: at for at, number in enumerate(_lasting(log))}
        runs = groupby((entry for entry in log.entries if max(entry, ~entry) in order), lambda entry: entry >= 0)
        for is_birth, entries in runs:
            if not is_birth:
                found.append(tuple(sorted(order[~entry] for entry in entries)))
                continue
            for number in entries:
                block, own = log.blocks[number], source(number)
                about = (block.part, block.phase, block.module, block.op, block.layer, block.on_host, block.fetched)
                powers, grows = record.powers[record.monomials[own]], bool(record.experts[own] >= 0)
                experts = len(block.experts) if grows else 0
                found.append((*about, powers, grows, experts, int(record.layers[own]), int(record.places[own])))
        return found

    largest = {
        max((block.bytes for block in of.log.blocks if block.phase == "optimizer"), default=0) for of in (one, record)
    }
    if len(largest) > 1 and max(largest) > _LITTLE:
        raise Unlike("the update takes other memory with another number of experts")
    ours, theirs = alike(one, rewritten.log, rewritten.sources.__getitem__), alike(record, record.log, int)
    if ours != theirs:
        at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
        raise Unlike(f"{ours[at]} is {theirs[at]} with another number of experts")


def _lasting(log: Log) -> list[int]:
    """Return the numbers of all blocks except the temporary ones of the optimizer's update.

    An update handles one parameter after the other, so its temporaries do not add up and need no repetition. Only the
    scalars of the gradient norm do, and these are freed before weights change.
    """
    return [n for n, block in enumerate(log.blocks) if block.phase != "optimizer" or block.layer is not None]


def _like(number: int, count: int, recorded: int) -> int:
    """Return which of `recorded` items stands for item `number` of `count`: the first for the first, the last for the
    last, the second for all others."""
    return 0 if number == 0 else recorded - 1 if number == count - 1 else min(1, recorded - 1)


class _Turn:
    """Position in one pass over a layer's groups of experts, while the new log is written.

    Args:
        stretches: start and end in `log.entries`, and expert ids, of each group of the pass in the record.
        log: the record's log.

    Attributes:
        stretch: index in `stretches` of the group of which a copy is being written.
        made: for each group written so far, recorded block -> its new blocks.
    """

    def __init__(self, stretches: Sequence[tuple[int, int, tuple[int, ...]]], log: Log) -> None:
        self._births = [[entry for entry in log.entries[start:stop] if entry >= 0] for start, stop, _ in stretches]
        self._place = {block: (n, k) for n, births in enumerate(self._births) for k, block in enumerate(births)}
        self._written: list[int] = []
        self.made: list[dict[int, list[int]]] = []

    @property
    def stretch(self) -> int:
        return self._written[-1]

    def begin(self, stretch: int) -> None:
        """Begin a new group, which is a copy of the recorded group with the index `stretch`."""
        self._written.append(stretch)
        self.made.append({})

    def freed(self, block: int) -> list[int] | None:
        """Return the new blocks that the group frees where the record frees `block`; None if no group allocates it.

        If an earlier recorded group allocates it, as a gradient that is copied to the host while the next group is
        computed, they are of the new group that lies as many groups back, at the same index among its allocations.
        Raises `Unlike` if there is none.
        """
        if block not in self._place:
            return None
        stretch, role = self._place[block]
        before = len(self.made) - 1 - (self.stretch - stretch)
        if before < 0 or role >= len(births := self._births[self._written[before]]):
            raise Unlike("a group frees what another has allocated")
        return self.made[before].get(births[role], [])


class _Rewriting:
    """Rewrites a record's log for other numbers of trained experts, on construction. To *write* an entry is to append
    its copy to the new log, here and in the methods below.

    Args:
        record: the record.
        source: bank of each recorded layer; None for layers without experts.
        target: bank of each of these layers in the new log.

    Attributes:
        log: the new log; its blocks still have the bytes of the recorded blocks.
        sources: [new blocks] number of the recorded block of which it is a copy.
        sizes: [new blocks] names and numbers of experts to which the block's bytes may be proportional.
    """

    def __init__(self, record: Record, source: Sequence[Bank | None], target: Sequence[Bank | None]) -> None:
        self._record, self._source, self._target = record, source, target
        self.log, self.sources, self.sizes = Log(), list[int](), list[Counts]()
        # [layers]; the last entry, for layer -1 (outside of layers), is that of the first layer in which experts train
        self._counts = [_counts(one, other) for one, other in zip(source, target, strict=True)]
        self._counts.append(next(c for c, bank in zip(self._counts, source, strict=True) if bank and bank.trained))
        self._single: dict[int, int] = {}  # block -> new block
        self._of_expert: dict[int, dict[int, int]] = {}  # block -> index of a trained expert -> new block
        self._of_group: dict[int, list[int]] = {}  # block -> new blocks of all groups
        self._write()

    def _write(self) -> None:
        old, at, place = self._record.log, 0, [0] * (len(self._record.log.entries) + 1)
        for stretches in _passes(old):
            self._outside(at, stretches[0][0], place)
            self._pass(stretches, place)
            at = stretches[-1][1]
        self._outside(at, len(old.entries), place)
        place[-1] = len(self.log.entries)
        self.log.marks = [replace(mark, at=place[mark.at]) for mark in old.marks]
        self.log.cuts = [cut._replace(at=place[cut.at]) for cut in old.cuts]

    def _outside(self, start: int, stop: int, place: list[int]) -> None:
        """Write `entries[start:stop]`, which lie outside of expert groups, those of a trained expert once for each
        expert that it stands for; fill `place` [entries] with the new index of each."""
        entries = self._record.log.entries

        def owner(at: int) -> tuple[int, int] | None:
            block = self._record.log.blocks[max(entries[at], ~entries[at])]
            return None if block.expert is None or block.layer is None else (block.layer, self._index(block))

        for of, run in groupby(range(start, stop), owner):
            there = list(run)
            for at in there:
                place[at] = len(self.log.entries)
                if of is None:
                    self._one(entries[at])
            if of is None:
                continue
            layer, index = of
            for expert in self._stands_for(layer, index):
                for at in there:
                    self._of(entries[at], expert)

    def _index(self, block: Block) -> int:
        """Return the position of a block's expert among the trained experts of its layer."""
        assert block.layer is not None
        assert block.expert is not None
        bank = self._source[block.layer]
        assert bank is not None
        return bank.trained.index(block.expert)

    def _stands_for(self, layer: int, index: int) -> list[int]:
        """Return which trained experts of a layer the one with this index in the record stands for."""
        source, target = self._source[layer], self._target[layer]
        assert source is not None
        assert target is not None
        recorded, count = len(source.trained), len(target.trained)
        return [number for number in range(count) if _like(number, count, recorded) == index]

    def _pass(self, stretches: list[tuple[int, int, tuple[int, ...]]], place: list[int]) -> None:
        """Write one pass over a layer's groups of experts, recorded as (start, stop, expert ids) of each group; set
        `place` of its entries to where it begins in the new log. Raises `Unlike` if a kind or size is not recorded."""
        entries = self._record.log.entries
        layer = next(
            int(self._record.layers[entry]) for entry in entries[stretches[0][0] : stretches[-1][1]] if entry >= 0
        )
        source, target = self._source[layer], self._target[layer]
        assert source is not None
        assert target is not None
        ids = [experts for *_, experts in stretches]
        alone = next((is_ for is_ in (False, True) if [of for _, of in source.groups(alone=is_)] == ids), None)
        if alone is None:
            raise Unlike(f"groups of experts {ids}")
        kinds = [kind for kind, _ in source.groups(alone=alone)]
        for at in range(stretches[0][0], stretches[-1][1]):
            place[at] = len(self.log.entries)
        groups = target.groups(alone=alone)
        counts = Counter((kind, len(experts) == 1) for kind, experts in groups)
        seen = Counter[tuple[Kind, bool]]()
        turn = _Turn(stretches, self._record.log)
        for kind, experts in groups:
            is_single = len(experts) == 1
            like = [n for n, of in enumerate(ids) if kinds[n] == kind and (len(of) == 1) == is_single]
            if not like:
                raise Unlike(f"no group of {kind} experts of that size is recorded")
            number, count = seen[kind, is_single], counts[kind, is_single]
            seen[kind, is_single] += 1
            turn.begin(like[_like(number, count, len(like)) if is_single and kind == "trained" else 0])
            start, stop, of = stretches[turn.stretch]
            sizes = {"group": (len(of), len(experts))}
            loops = self._loops(start, stop, len(of))
            for at in range(start, stop):
                entry = entries[at]
                if self._record.log.blocks[max(entry, ~entry)].fetched:  # copies of whole layers from the host
                    if entry < 0 or len(turn.made) == 1:
                        self._one(entry)
                elif entry >= 0:
                    times = len(experts) if loops.get(entry) == 0 else 1 if entry not in loops else 0
                    births = [self._birth(entry, sizes, experts) for _ in range(times)]
                    self._of_group.setdefault(entry, []).extend(births)
                    turn.made[-1][entry] = births
                elif (freed := turn.freed(~entry)) is not None:
                    for made in freed:
                        self._death(made)
                elif (block := self._record.log.blocks[~entry]).expert is not None:
                    for expert in self._stands_for(layer, self._index(block)):
                        if target.trained[expert] in experts:
                            self._of(entry, expert)
                else:
                    self._one(entry)

    def _loops(self, start: int, stop: int, count: int) -> dict[int, int]:
        """Return block -> its index in a loop, for what a group allocates once for each of its `count` experts.

        A loop is `count` consecutive allocations by one operation, such as of the gradients of experts' biases.
        """
        found: dict[int, int] = {}
        blocks = self._record.log.blocks

        def kind(entry: int) -> Hashable:
            return entry >= 0 and (blocks[entry].op, blocks[entry].part, int(self._record.coefficients[entry]))

        for is_birth, run in groupby(self._record.log.entries[start:stop], kind):
            if is_birth and len(there := list(run)) == count > 1:
                found |= {entry: turn for turn, entry in enumerate(there)}
        return found

    def _one(self, entry: int) -> None:
        """Write an entry once; if it frees what every group has allocated, write a release for each group."""
        if entry >= 0:
            block = self._record.log.blocks[entry]
            layer = int(self._record.layers[entry]) if block.layer is None else block.layer
            # a copy from the host is of another layer than the one that computes; all that train are alike
            self._single[entry] = self._birth(entry, self._counts[-1 if block.fetched else layer])
        elif ~entry in self._single:
            self._death(self._single[~entry])
        else:
            for number in self._of_group.get(~entry, ()):
                self._death(number)

    def _of(self, entry: int, expert: int) -> None:
        """Write an entry of a trained expert for the one at position `expert` among the new trained experts."""
        if entry >= 0:
            self._of_expert.setdefault(entry, {})[expert] = self._birth(entry, {})
        elif expert in self._of_expert.get(~entry, {}):
            self._death(self._of_expert[~entry][expert])

    def _birth(self, source: int, sizes: Counts, experts: tuple[int, ...] = ()) -> int:
        """Write the allocation of a copy of block `source`, by the group of `experts` (empty: those of the block), and
        return the copy's number."""
        number, block = len(self.log.blocks), self._record.log.blocks[source]
        self.log.blocks.append(block.again(len(self.log.entries), experts or block.experts))
        self.log.entries.append(number)
        self.sources.append(source)
        self.sizes.append(sizes)
        return number

    def _death(self, number: int) -> None:
        """Write the release of a new block; do nothing if it has been freed already."""
        block = self.log.blocks[number]
        if block.died is None:
            block.died = len(self.log.entries)
            self.log.entries.append(~number)


def _counts(one: Bank | None, other: Bank | None) -> Counts:
    if one is None or other is None:
        return {}
    return {name: (was, other.sizes[name]) for name, was in one.sizes.items() if was}


def _is_of_all(log: Log, entry: int) -> bool:
    return entry < 0 and not log.blocks[~entry].experts and log.blocks[~entry].expert is None


def _passes(log: Log) -> list[list[tuple[int, int, tuple[int, ...]]]]:
    """Return each pass over a layer's experts as a list of its groups: (start, end in `log.entries`, expert ids)."""
    passes: list[list[tuple[int, int, tuple[int, ...]]]] = []
    now: list[tuple[int, int, tuple[int, ...]]] = []
    for group, following in zip(log.groups, [*log.groups[1:], None], strict=True):
        if group.experts and following is not None:
            stop = following.at
            while not following.experts and stop > group.at and _is_of_all(log, log.entries[stop - 1]):
                stop -= 1  # what all groups share is freed just before the end of the last is recorded
            now.append((group.at, stop, group.experts))
        elif now:
            passes.append(now)
            now = []
    return passes
