"""The sizes that a step's tensors grow with, and the monomials in them that each tensor's bytes are.

| name | what |
|---|---|
| B, S | rows of a micro-batch, and their tokens |
| 2B+1 | cu_seqlens of packed documents, two a row; in an evaluation 2E+1 |
| S↑n, S+256 | S rounded up to a multiple of n, and with 128 rows for each document, as attention kernels pad |
| n | tokens that the experts at work receive; in an evaluation E rows, and m |
| r0, r1, … | tokens that go to the experts of each `ep` rank; in an evaluation q0, q1, … |
| c, c′ | tokens of a chunk of the loss, and of the last one; of an evaluation d, d′ |
| b′, b″ | tokens of the last float32 block of a chunk, and of the last chunk; b of the others |

A record is made at sizes that can be told apart in numbers of bytes (probe.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import gcd
from operator import itemgetter

import numpy as np

from moetune.memory.trace.log import Block
from moetune.run.resolve import ResolvedRun
from moetune.training.step.loss import Chunks

Sizes = dict[str, int]
Powers = tuple[tuple[str, int], ...]
"""A monomial: each size and its exponent, sorted."""

MOST_ALIGNED = 64
"""Largest alignment of a length."""
_ROUNDED = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Shape:
    """Properties of a batch that decide which tensors exist: a record of one shape serves all its sizes.

    Attributes:
        aligned: the largest power of two up to 64 that divides the length.
        one_row: whether a batch has one row, and attention is computed by plain operations: some copy rows that are
            beside others, and not a single one.
        is_alone: whether a batch is one chunk of the loss, of a tail that trains: then no gradients are summed up.
        held_out: whether there are held-out batches that count.
        idle: the numbers of the experts that receive no token, of a batch and of a held-out one.
        longer: numbers of the model's configuration, such as a window, that a sequence is shorter than.
    """

    aligned: int
    one_row: bool = False
    is_alone: bool = False
    held_out: bool = False
    idle: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    longer: tuple[int, ...] = ()


Place = tuple[str, str]
"""Position in the loops of the loss: the chunk, and the block of it; "" outside of them."""

PLACES: tuple[Place, ...] = (("", ""), *product(("first", "middle", "last"), ("", "full", "rest")))
"""One chunk between the first and the last stands for all such, and one full block for all but the last of a chunk."""


def places(chunks: Chunks | None) -> np.ndarray:
    """[places] whether a step has them whose loss is divided so; None: it has no loss."""
    there: set[Place] = {("", "")}
    if chunks is not None:
        count = -(-chunks.tokens // chunks.size)
        last = chunks.tokens - (count - 1) * chunks.size
        sizes = {"first": chunks.size, "middle": chunks.size, "last": last}
        for chunk in {1: ("first",), 2: ("first", "last")}.get(count, tuple(sizes)):
            there |= {(chunk, ""), (chunk, "rest")} | ({(chunk, "full")} if sizes[chunk] > chunks.block else set())
    return np.array([place in there for place in PLACES])


@dataclass(frozen=True)
class NotedChunks(Chunks):
    """Chunks that note where a step is in the loops of the loss.

    Attributes:
        length: of the step's log.
        noted: from which length of the log on the step is at which place.
    """

    length: Callable[[], int]
    noted: list[tuple[int, Place]] = field(default_factory=lambda: [(0, ("", ""))])

    def slices(self) -> Iterator[slice]:
        for rows in super().slices():
            self._at("first" if rows.start == 0 else "last" if rows.stop >= self.tokens else "middle")
            yield rows
            self._at("")

    def blocks(self, tokens: int) -> Iterator[slice]:
        chunk = self.noted[-1][1][0]
        for rows in super().blocks(tokens):
            self._at(chunk, "full" if rows.stop < tokens else "rest")
            yield rows
            self._at(chunk)

    def _at(self, chunk: str, block: str = "") -> None:
        self.noted.append((self.length(), (chunk, block)))

    def place(self, at: int) -> int:
        """The number of the place at which something was noted in the log."""
        return PLACES.index(self.noted[bisect_right(self.noted, at, key=itemgetter(0)) - 1][1])


def alignment(length: int) -> int:
    return gcd(length, MOST_ALIGNED)


def sizes_of_chunks(chunks: Chunks, names: Sequence[str]) -> Sizes:
    """The sizes of chunks and blocks, under these names: chunk, last chunk, block, last block of each."""
    count = -(-chunks.tokens // chunks.size)
    last = chunks.tokens - (count - 1) * chunks.size
    values = (chunks.size, last, chunks.block, _rest(chunks.size, chunks.block), _rest(last, chunks.block))
    return dict(zip(names, values, strict=True))


def _rest(tokens: int, block: int) -> int:
    return tokens - (-(-tokens // block) - 1) * block


CHUNK_NAMES = ("c", "c′", "b", "b′", "b″")
HELD_OUT_NAMES = ("d", "d′", "e", "e′", "e″")


def rows_and_cu_seqlens(rows: int, name: str) -> Sizes:
    """Rows of a batch, and the cu_seqlens of their documents (`training/step/batch.py: random_rows` has two a row)."""
    return {name: rows, f"2{name}+1": 2 * rows + 1}


def lengths(sequence: int) -> Sizes:
    """S, its neighbours and what it is rounded up to."""
    near = {f"S{n:+}": sequence + n for n in (-1, 1, 256)}
    return {"S": sequence, **near, **{f"S↑{n}": -(-sequence // n) * n for n in _ROUNDED}}


def sizes_of(rows: int, length: int, batch: Chunks, held_out_rows: int, held_out: Chunks | None) -> Sizes:
    """All sizes of a step.

    Args:
        batch, held_out: how the loss divides the tokens of a batch, and of a held-out one that counts.
    """
    sizes = {**lengths(length), **sizes_of_chunks(batch, CHUNK_NAMES), **rows_and_cu_seqlens(rows, "B")}
    if held_out is not None:
        sizes |= {**rows_and_cu_seqlens(held_out_rows, "E"), **sizes_of_chunks(held_out, HELD_OUT_NAMES)}
    return sizes


@dataclass(frozen=True)
class ExpertRows:
    """Rows of each expert, of a batch and of a held-out one."""

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


def exchanged(run: ResolvedRun, rows: ExpertRows) -> Sizes:
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


class Monomials:
    """Factors numbers of bytes into products of sizes.

    Args:
        sizes: probe sizes.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        first: dict[int, str] = {}
        for name, value in sizes.items():
            if value > 1:
                first.setdefault(value, name)
        self.values = sorted(((value, name) for value, name in first.items()), reverse=True)

    def of(self, nbytes: int, rows: int = 0) -> tuple[int, bool, Powers]:
        """(coefficient, whether it grows with the rows of experts, monomial of all else).

        Args:
            rows: of the experts at work; 0 if there are none.
        """
        powers: dict[str, int] = {}
        rest, grows = nbytes, bool(rows and nbytes and nbytes % rows == 0)
        if grows:
            rest //= rows
        for value, name in self.values:
            if value > rest:
                continue
            while rest and rest % value == 0:
                rest //= value
                powers[name] = powers.get(name, 0) + 1
        return rest, grows, tuple(sorted(powers.items()))


def value_of(powers: Powers, sizes: Mapping[str, int]) -> int:
    product = 1
    for name, exponent in powers:
        product *= sizes[name] ** exponent
    return product


def values_of(monomials: Sequence[Powers], sizes: Mapping[str, int]) -> np.ndarray:
    return np.array([value_of(powers, sizes) for powers in monomials], dtype=np.int64)
