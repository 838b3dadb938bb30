"""One step of a shortened model, recorded at telling sizes: every storage, as a monomial of the sizes.

A record is made twice, at different sizes. The first gives the monomials; the second, which was not used for them, must
be what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    rows_and_cu_seqlens,
    sizes_of_chunks,
    telling_chunks,
    telling_rows,
    values_of,
)
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.log import Block, Log
from moetune.memory.trace.repeat import Owners
from moetune.memory.trace.steps import Feed, Steps, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.run.resolve import ResolvedRun
from moetune.training.step.loss import Chunks


class NoClosedForm(UserError):
    """A storage of the step is no product of sizes that are known."""


@dataclass(frozen=True)
class Record:
    """One step of a shortened model.

    Attributes:
        log: every storage and its order, at the first of the telling sizes.
        coefficients: [blocks] bytes are this times the monomial, and times the rows of `experts`.
        monomials: [blocks] numbers into `powers`.
        experts: [blocks] numbers into `groups`, with whose rows the bytes go; -1 for none.
        layers: [blocks] the decoder layer, of those that are run, that was at work; -1 outside of layers.
        places: [blocks] numbers into `sizes.PLACES`: where in the loops of the loss they are made.
        groups: experts whose rows are computed together.
    """

    log: Log
    coefficients: np.ndarray
    monomials: np.ndarray
    powers: tuple[Powers, ...]
    experts: np.ndarray
    layers: np.ndarray
    places: np.ndarray
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def on_host(self) -> np.ndarray:
        """[blocks]"""
        return np.array([block.on_host for block in self.log.blocks], dtype=bool)

    @cached_property
    def held_out(self) -> np.ndarray:
        """[blocks] whether their rows are those of a held-out batch."""
        return np.array([block.phase == "evaluation" for block in self.log.blocks], dtype=bool)


@dataclass(frozen=True)
class Rows:
    """What experts receive: rows of each of a batch, and of a held-out one."""

    trained: tuple[int, ...]
    held_out: tuple[int, ...] = ()

    @property
    def idle(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The experts that receive none, of each."""
        of_batch, of_held_out = (
            tuple(expert for expert, count in enumerate(counts) if not count)
            for counts in (self.trained, self.held_out)
        )
        return of_batch, of_held_out

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

    def longer(self, limits: Collection[int]) -> tuple[int, ...]:
        """Those that its length is below."""
        return tuple(sorted(limit for limit in limits if limit > self.sequence))

    def of_length(self, sequence: int, shape: Shape) -> _Telling:
        """The same with sequences of this length: its sizes need not tell, for they are only compared."""

        def chunks(rows: int, *, alone: bool = False) -> Chunks:
            tokens = rows * sequence
            size = last = tokens
            if not alone:
                size = tokens * 36 // 100
                last = tokens - 2 * size
            return Chunks(tokens, size, (size // 2 + last) // 2)

        held_out = chunks(self.held_out_rows) if shape.held_out else None
        return replace(self, sequence=sequence, batch=chunks(self.rows, alone=shape.is_alone), held_out=held_out)

    def count(self, total: int, experts: int, top_k: int, tp: int) -> list[int]:
        """How many rows each expert receives of `total`."""
        return telling_rows(total, experts, self.idle[total != self.batch.tokens * top_k // tp])

    def sizes(self) -> Sizes:
        sizes = {**lengths(self.sequence), **sizes_of_chunks(self.batch, CHUNK_NAMES)}
        if self.rows > 1:
            sizes |= rows_and_cu_seqlens(self.rows, "B")
        if self.held_out is not None:
            sizes |= {**rows_and_cu_seqlens(self.held_out_rows, "E"), **sizes_of_chunks(self.held_out, HELD_OUT_NAMES)}
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


def record(steps: Steps, shape: Shape, length: int, limits: Collection[int] = ()) -> Record:
    """Records one step of a shortened model.

    Args:
        steps: of that model, its optimizer's states made.
        shape: what the batches are to be like.
        length: of a sequence of that shape.
        limits: numbers that a length may be compared with. Where telling lengths are not on the same side of all of
            them as this one, the record is compared with a step of this length too.

    Raises:
        NoClosedForm: a storage is no product of sizes.
    """
    if not steps.adapted.ranks.is_single:
        _recorded(steps, _Telling.of(shape, (), 2))  # FSDP2 makes in its first step what it keeps
    own = {size for tensor in steps.adapted.model.parameters() for size in tensor.shape}
    telling = [_Telling.of(shape, own, number) for number in (0, 1)]
    if any(one.longer(limits) != shape.longer for one in telling):
        telling.append(telling[0].of_length(length, shape))
    (log, sizes, rows, where), *others = (_recorded(steps, one) for one in telling)
    for other, *_ in others:
        _refuse_other_storages(log, other)
    names = Monomials(sizes)
    found = [names.of(block.bytes, rows.of(block)) for block in log.blocks]
    for at, (block, *elsewhere) in enumerate(zip(log.blocks, *(other.blocks for other, *_ in others), strict=True)):
        if all(one.bytes == block.bytes for one in elsewhere):  # constant, even if a telling size divides it
            found[at] = (block.bytes, False, ())
    powers = list(dict.fromkeys(power for *_, power in found))
    numbers = {power: number for number, power in enumerate(powers)}
    for other, other_sizes, other_rows, _ in others:
        _compare(log, other, found, dict(zip(powers, values_of(powers, other_sizes).tolist(), strict=True)), other_rows)
    groups = list(dict.fromkeys(block.experts for block in log.blocks if block.experts))
    of_group = {group: number for number, group in enumerate(groups)}
    goes = [of_group[block.experts] if goes else -1 for block, (_, goes, _) in zip(log.blocks, found, strict=True)]
    of = Owners(log, Shortened(steps.adapted.run, tuple(steps.layers), ())).born
    return Record(
        log,
        np.array([coefficient for coefficient, *_ in found], dtype=np.int64),
        np.array([numbers[power] for *_, power in found], dtype=np.int64),
        tuple(powers),
        np.array(goes, dtype=np.int64),
        np.array([-1 if layer is None else layer for layer in of], dtype=np.int64),
        where,
        tuple(groups),
    )


def _refuse_other_storages(log: Log, other: Log) -> None:
    """Raises `NoClosedForm` if a step at other sizes makes other storages, or in another order."""
    if log.entries != other.entries:
        pairs = enumerate(zip(log.entries, other.entries, strict=False))
        at = next((n for n, pair in pairs if pair[0] != pair[1]), min(len(log.entries), len(other.entries)) - 1)
        block = log.blocks[log.entries[at] if log.entries[at] >= 0 else ~log.entries[at]]
        raise NoClosedForm(f"the step makes other storages at another size, from {block.op} in {block.module!r} on")


def _compare(
    log: Log, other: Log, found: Sequence[tuple[int, bool, Powers]], values: Mapping[Powers, int], rows: Rows
) -> None:
    """Refuses a record that is not what a step at other sizes is.

    Args:
        found: of each block its coefficient, whether it goes with rows, and its monomial.
        values: the monomials at the other sizes.
    """
    for block, is_, (coefficient, goes_with_rows, power) in zip(log.blocks, other.blocks, found, strict=True):
        if is_.bytes != coefficient * values[power] * (rows.of(is_) if goes_with_rows else 1):
            raise NoClosedForm(
                f"{block.op} in {block.module or 'no module'} ({block.phase}) makes {block.bytes:,} bytes at one size "
                f"and {is_.bytes:,} at another: not a product of sizes"
            )


def _recorded(steps: Steps, telling: _Telling) -> tuple[Log, Sizes, Rows, np.ndarray]:
    """The log of a step, its sizes, what experts received, and the places of its blocks."""
    config, adapted = steps.config, steps.adapted
    parallel = config.parallel
    moe = adapted.structure.moe_layers
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

    def rows_of(chunks: Chunks | None) -> tuple[int, ...]:
        if chunks is None:
            return ()
        return tuple(telling.count(chunks.tokens * top_k // parallel.tp, experts, top_k, parallel.tp))

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
