"""One step of a shortened model, recorded at telling sizes: every storage, as a monomial of the sizes.

A record is made twice, at different sizes. The first gives the monomials; the second, which was not used for them, must
be what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from moetune.errors import UserError
from moetune.memory.closed_form.sizes import (
    CHUNK_NAMES,
    HELD_OUT_NAMES,
    PLACES,
    Monomials,
    NotedChunks,
    Powers,
    Shape,
    Sizes,
    lengths,
    primes,
    rows_and_borders,
    sizes_of_chunks,
    telling_chunks,
    telling_rows,
    value_of,
)
from moetune.memory.report import PartName, Phase
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.log import Block, Log
from moetune.memory.trace.repeat import Owners
from moetune.memory.trace.steps import Feed, Steps, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.run.resolve import ResolvedRun
from moetune.step.loss import Chunks


class NoClosedForm(UserError):
    """A storage of the step is no product of sizes that are known."""


@dataclass(frozen=True)
class Piece:
    """A stretch of the step: changes in order, each of so many storages alike.

    Attributes:
        blocks: [n] their numbers.
        signs: [n] how many of them are born, or, negative, die.
        unit: which group of layers it is of, and happens once for each that the group stands for; or -1.
        once: [m] changes after the last of these that happen only once.
    """

    blocks: np.ndarray
    signs: np.ndarray
    unit: int
    backward: bool
    once: np.ndarray
    once_signs: np.ndarray
    phase: Phase
    micro_step: int


@dataclass(frozen=True)
class Kind:
    """What a block is: all but its bytes."""

    part: PartName
    phase: Phase
    module: str
    op: str
    on_host: bool
    managed: bool


@dataclass(frozen=True)
class Record:
    """One step of a run, in order.

    Attributes:
        coefficients: [blocks] bytes are this times the monomial, and times the rows of `experts`.
        monomials: [blocks] numbers into `powers`.
        experts: [blocks] numbers into `groups`, with whose rows the bytes go; -1 for none.
        held_out: [blocks] whether these are the rows of a held-out batch.
        places: [blocks] numbers into `sizes.PLACES`: where in the loops of the loss they are made.
        kinds: [blocks] numbers into `named`.
        copies: for each group of layers that stands for others, the layers of each.
        groups: experts whose rows are computed together.
    """

    coefficients: np.ndarray
    monomials: np.ndarray
    powers: tuple[Powers, ...]
    experts: np.ndarray
    held_out: np.ndarray
    places: np.ndarray
    kinds: np.ndarray
    named: tuple[Kind, ...]
    pieces: tuple[Piece, ...]
    copies: tuple[tuple[tuple[int, ...], ...], ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Rows:
    """What experts receive: rows of each of a batch, and of a held-out one."""

    trained: Sequence[int]
    held_out: Sequence[int] = ()

    def of(self, block: Block) -> int:
        """The rows of the experts that a block was made for; 0 if it was for none."""
        counts = self.held_out if block.phase == "evaluation" else self.trained
        return sum(counts[expert] for expert in block.experts)


@dataclass(frozen=True)
class _Telling:
    """The sizes of one recording: products of primes that are no size of the model's own.

    Attributes:
        batch, held_out: how the loss divides its tokens.
    """

    rows: int
    sequence: int
    held_out_rows: int
    batch: Chunks
    held_out: Chunks | None
    idle: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, shape: Shape, own: Collection[int], number: int) -> _Telling:
        """The telling sizes of that number."""
        free = (p for p in primes(53) if _is_rough(2 * p + 1) and not any(size % p == 0 for size in own))
        for _ in range(number + 1):
            rows = next(free)
            held_out_rows = next(p for p in free if (2 * p + 1) % rows and (2 * rows + 1) % p)
        rows = 1 if shape.one_row else rows
        # One above a multiple of 128 pieces: what it is rounded up to then differs, whatever it is rounded to.
        shortest = 2**16 // shape.aligned if shape.one_row else 53
        candidates = (shape.aligned * p for p in primes(shortest) if p % (2 * _LONGEST // shape.aligned) == 1)
        sequence = next(islice((n for n in candidates if _tells(n, {rows, held_out_rows} - {1})), number, None))
        held_out = telling_chunks(held_out_rows * sequence) if shape.held_out else None
        batch = telling_chunks(rows * sequence, alone=shape.is_alone)
        return cls(rows, sequence, held_out_rows, batch, held_out, shape.idle)

    def count(self, total: int, experts: int, top_k: int, tp: int) -> list[int]:
        """How many rows each expert receives of `total`."""
        return telling_rows(total, experts, self.idle[total != self.batch.tokens * top_k // tp])

    def sizes(self) -> Sizes:
        sizes = {**lengths(self.sequence), **sizes_of_chunks(self.batch, CHUNK_NAMES)}
        if self.rows > 1:
            sizes |= rows_and_borders(self.rows, "B")
        if self.held_out is not None:
            sizes |= {**rows_and_borders(self.held_out_rows, "E"), **sizes_of_chunks(self.held_out, HELD_OUT_NAMES)}
        return sizes


_LONGEST = 64  # what a length is aligned to at most (sizes.py)


def _tells(sequence: int, rows: Collection[int]) -> bool:
    """Whether no size that follows from the length is a product of small primes, or shares one with the rows."""
    return all(
        _is_rough(size) and all(size % p and size % (2 * p + 1) for p in rows) for size in lengths(sequence).values()
    )


def _is_rough(number: int) -> bool:
    """Whether it has a prime factor above 50."""
    for divisor in range(2, 50):
        while number % divisor == 0:
            number //= divisor
    return number > 50


def record(steps: Steps, short: Shortened, shape: Shape) -> Record:
    """Records one step of a shortened model.

    Args:
        steps: of that model, its optimizer's states made.
        shape: what the batches are to be like.

    Raises:
        NoClosedForm: a storage is no product of sizes.
    """
    if not steps.adapted.ranks.is_single:
        _recorded(steps, shape, 2)  # FSDP2 makes in its first step what it keeps
    one, two = (_recorded(steps, shape, number) for number in (0, 1))
    (log, sizes, rows, where), (other, other_sizes, other_rows, _) = one, two
    if log.entries != other.entries:
        at = next(n for n, pair in enumerate(zip(log.entries, other.entries, strict=False)) if pair[0] != pair[1])
        block = log.blocks[log.entries[at] if log.entries[at] >= 0 else ~log.entries[at]]
        raise NoClosedForm(f"the step makes other storages at another size, from {block.op} in {block.module!r} on")
    names = Monomials(sizes)
    found: list[tuple[int, bool, Powers]] = []
    for block, is_ in zip(log.blocks, other.blocks, strict=True):
        coefficient, goes_with_rows, power = names.of(block.bytes, rows.of(block))
        said = coefficient * value_of(power, other_sizes) * (other_rows.of(is_) if goes_with_rows else 1)
        if is_.bytes == said:
            found.append((coefficient, goes_with_rows, power))
        elif is_.bytes == block.bytes:  # a sum of the model's own sizes, which a telling one happens to divide
            found.append((block.bytes, False, ()))
        else:
            raise NoClosedForm(
                f"{block.op} in {block.module or 'no module'} ({block.phase}) makes {block.bytes:,} bytes at one size "
                f"and {is_.bytes:,} at another: not a product of sizes"
            )
    powers = list(dict.fromkeys(power for *_, power in found))
    numbers = {power: number for number, power in enumerate(powers)}
    kinds = [Kind(b.part, b.phase, b.module, b.op, b.on_host, b.managed) for b in log.blocks]
    named = list(dict.fromkeys(kinds))
    places = {kind: number for number, kind in enumerate(named)}
    groups = list(dict.fromkeys(block.experts for block in log.blocks if block.experts))
    of_group = {group: number for number, group in enumerate(groups)}
    goes = [of_group[block.experts] if goes else -1 for block, (_, goes, _) in zip(log.blocks, found, strict=True)]
    return Record(
        np.array([coefficient for coefficient, *_ in found], dtype=np.int64),
        np.array([numbers[power] for *_, power in found], dtype=np.int64),
        tuple(powers),
        np.array(goes, dtype=np.int64),
        np.array([block.phase == "evaluation" for block in log.blocks], dtype=bool),
        where,
        np.array([places[kind] for kind in kinds], dtype=np.int64),
        tuple(named),
        tuple(pieces(log, short)),
        tuple(unit.copies for unit in short.units),
        tuple(groups),
    )


def _recorded(steps: Steps, shape: Shape, number: int) -> tuple[Log, Sizes, Rows, np.ndarray]:
    """The log of a step, its sizes, what experts received, and the places of its blocks."""
    config, adapted = steps.config, steps.adapted
    own = {size for tensor in adapted.model.parameters() for size in tensor.shape}
    telling = _Telling.of(shape, own, number)
    parallel = config.parallel
    moe = adapted.anatomy.moe_layers
    top_k, experts = (moe[0].top_k, moe[0].shape.num_experts) if moe else (1, 1)

    def count(layer: int, ids: Tensor, num_experts: int) -> list[int]:
        return telling.count(ids.numel(), num_experts, top_k, parallel.tp)

    tracker = Tracker(steps.named)
    batch, held_out = (
        NotedChunks(chunks.tokens, chunks.size, chunks.block, lambda: len(tracker.log.entries))
        for chunks in (telling.batch, telling.held_out or telling.batch)
    )
    held_out_rows = telling.held_out_rows if telling.held_out is not None else 0
    feed = Feed(batches_of(adapted, telling.sequence), telling.rows, held_out_rows, batch, held_out)
    with steps.counting(count):
        if adapted.ranks.is_single:  # the last one, which adds to the gradients of those before it
            micro_steps = min(2, config.train.accumulate)
            log = steps.record(tracker, feed, micro_steps, begun=micro_steps - 1)
        else:  # the first one and the last send other things than those between
            log = steps.record(tracker, feed, min(3, config.train.accumulate))

    def rows_of(chunks: Chunks | None) -> list[int]:
        return (
            [] if chunks is None else telling.count(chunks.tokens * top_k // parallel.tp, experts, top_k, parallel.tp)
        )

    rows = Rows(rows_of(telling.batch), rows_of(telling.held_out))
    return log, telling.sizes() | exchanged(adapted.run, rows), rows, _places_of(log, batch, held_out)


def _places_of(log: Log, batch: NotedChunks, held_out: NotedChunks) -> np.ndarray:
    """Where each block is made. A place that a division of the loss leaves out takes its blocks with it.

    Raises:
        NoClosedForm: a block that is made elsewhere dies in such a place.
    """
    chunks = [held_out if block.phase == "evaluation" else batch for block in log.blocks]
    made = [of.place(block.born) for of, block in zip(chunks, log.blocks, strict=True)]
    for at, entry in enumerate(log.entries):
        if entry >= 0:
            continue
        chunk, block = PLACES[chunks[~entry].place(at)]
        its_chunk, its_block = PLACES[made[~entry]]
        if (chunk in ("middle", "last") and chunk != its_chunk) or (block == "full" and block != its_block):
            dead = log.blocks[~entry]
            raise NoClosedForm(f"{dead.op} in {dead.module!r} is freed in another chunk of the loss than it is made in")
    return np.array(made, dtype=np.int64)


def exchanged(run: ResolvedRun, rows: Rows) -> Sizes:
    """The rows that go to each of the ranks which share the experts."""
    if not run.placement:
        return {}
    placed = next(iter(run.placement.values()))
    return {
        f"{name}{rank}": sum(counts[expert] for expert in held)
        for name, counts in (("r", rows.trained), ("q", rows.held_out))
        for rank, held in enumerate(placed)
        if counts
    }


def pieces(log: Log, short: Shortened) -> Iterator[Piece]:
    """The log as stretches that can be repeated: who dies where is told in repeat.py; here only bytes count, so that of
    storages alike it does not matter which one dies."""
    owners = Owners(log, short)
    match = owners.matches(log)
    passed_on = set(match.values())
    numbers = {unit.layers[-1]: number for number, unit in enumerate(short.units)}
    marks = iter(log.marks)
    mark = next(marks)
    following = next(marks, None)
    for stretch in owners.stretches:
        blocks: list[int] = []
        signs: list[int] = []
        once: list[int] = []
        own = stretch.layer
        for at in range(stretch.start, stretch.stop):
            while following is not None and following.at <= at:
                mark, following = following, next(marks, None)
            entry = log.entries[at]
            number = entry if entry >= 0 else ~entry
            owner, fetched = owners.of[number], log.blocks[number].fetched
            sign = 1 if entry >= 0 else -1
            if stretch.unit is not None:
                if entry < 0 and not fetched and owner != own and (number, own) not in match:
                    once.append(number)
                    continue
            elif (unit := None if owner is None else owners.units.get(owner)) is not None:
                is_one = entry < 0 and (fetched or (own is not None and number in passed_on))
                sign *= 1 if is_one else len(unit.copies)
            blocks.append(number)
            signs.append(sign)
        yield Piece(
            np.array(blocks, dtype=np.int64),
            np.array(signs, dtype=np.int64),
            -1 if stretch.unit is None else numbers[stretch.layer],  # type: ignore[index]
            stretch.backward,
            np.array(once, dtype=np.int64),
            -np.ones(len(once), dtype=np.int64),
            mark.phase,
            mark.micro_step,
        )
