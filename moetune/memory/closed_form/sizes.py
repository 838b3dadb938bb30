"""Sizes that a step's memory depends on, such as rows, length and tokens of experts, and monomials of sizes.

A monomial is a product of powers of sizes, such as B·S². The sizes have these names in formulas:

| name | in an evaluation | meaning |
|---|---|---|
| B | E | rows of a micro-batch |
| 2B+1 | 2E+1 | entries of cu_seqlens for packed documents, two a row |
| S | S | tokens of a row |
| S-1, S+1 | | S less and plus one token |
| S↑n, S+256 | | S rounded up to a multiple of n; S plus 128 rows for each of two documents, as attention kernels pad |
| ⌈S/n⌉ | | tiles of n tokens in a sequence, each of which has a workspace in attention kernels |
| n | n | tokens received by the experts that are computed together |
| r0, r1, … | q0, q1, … | tokens sent to the experts of each `ep` rank, in a record; else to those of this rank |
| c, c′ | d, d′ | tokens of a chunk of the loss; of the last chunk |
| b | e | tokens of a block of a chunk, whose logits are in float32 at once |
| b′, b″ | e′, e″ | tokens of the last block in a chunk; of the last block in the last chunk |

probe.py chooses values at which the bytes of a tensor show which sizes they are a product of.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import gcd
from operator import itemgetter

import numpy as np

from moetune.memory.trace.log import Block
from moetune.training.step.loss import Chunks

Sizes = dict[str, int]
"""Name of a size -> its value."""
Powers = tuple[tuple[str, int], ...]
"""A monomial: pairs of a size's name and its exponent, sorted; empty for a constant."""

MOST_ALIGNED = 64
"""Largest power of two by which alignments of a length are distinguished."""
_ROUNDED = (8, 16, 32, 64, 128)
_TILES = (64, 128)


@dataclass(frozen=True)
class Shape:
    """Properties of a batch that decide which tensors a step allocates: one record serves all sizes of equal shape.

    Attributes:
        aligned: largest power of two, up to 64, that divides the sequence length.
        one_row: whether a batch has a single row and attention consists of plain operations, some of which copy their
            input only if there are several rows.
        is_alone: whether the loss has a single chunk and the LM head trains, so that no gradients of chunks are summed.
        held_out: whether an evaluation's batch has more rows than a micro-batch, and so is recorded.
        idle: ids of the experts that receive no token, in a micro-batch and in an evaluation's batch.
        longer: lengths in the model's configuration, such as a window, that are greater than the sequence length.
        only: rows, tokens of a row, a chunk and a block of the loss, and the same of an evaluation's batch, if the
            record serves these sizes only, because the model's code loops over a sequence; else empty.
    """

    aligned: int
    one_row: bool = False
    is_alone: bool = False
    held_out: bool = False
    idle: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    longer: tuple[int, ...] = ()
    only: tuple[int, ...] = ()


Place = tuple[str, str]
"""Position in the loops of the loss: (kind of chunk, kind of block in it), as in `PLACES`; "" outside of a loop."""

PLACES: tuple[Place, ...] = (("", ""), *product(("first", "middle", "last"), ("", "full", "rest")))
"""All places. "middle": any chunk between the first and the last; "rest": a chunk's last block; "full": any other."""


def places(chunks: Chunks | None) -> np.ndarray:
    """Return whether each of `PLACES` occurs when the loss divides a batch into `chunks` (None: no batch), as booleans
    [len(PLACES)]."""
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
    """Chunks of the loss that record, while the loss iterates over them, where in `PLACES` each log entry is made.

    Attributes:
        length: returns the number of entries in the step's log so far.
        noted: (number of entries in the log, place of all entries after these), in order of time.
    """

    length: Callable[[], int]
    noted: list[tuple[int, Place]] = field(default_factory=lambda: [(0, ("", ""))])

    def slices(self) -> Iterator[slice]:
        """Yield each chunk as a slice of the batch's tokens, and record whether it is the first, a middle or the last
        one."""
        for rows in super().slices():
            self._at("first" if rows.start == 0 else "last" if rows.stop >= self.tokens else "middle")
            yield rows
            self._at("")

    def blocks(self, tokens: int) -> Iterator[slice]:
        """Yield each block as a slice of the `tokens` tokens of a chunk, and record whether it is a full block or the
        rest."""
        chunk = self.noted[-1][1][0]
        for rows in super().blocks(tokens):
            self._at(chunk, "full" if rows.stop < tokens else "rest")
            yield rows
            self._at(chunk)

    def _at(self, chunk: str, block: str = "") -> None:
        self.noted.append((self.length(), (chunk, block)))

    def place(self, at: int) -> int:
        """Return the index in `PLACES` of the place at which the log's entry with index `at` was recorded."""
        return PLACES.index(self.noted[bisect_right(self.noted, at, key=itemgetter(0)) - 1][1])


def alignment(length: int) -> int:
    """Return the largest power of two, up to `MOST_ALIGNED`, that divides a length."""
    return gcd(length, MOST_ALIGNED)


def sizes_of_chunks(chunks: Chunks, names: Sequence[str]) -> Sizes:
    """Return the five sizes, in tokens, of a division of the loss, under `names`: `CHUNK_NAMES` or `HELD_OUT_NAMES`.

    In order: a chunk, the last chunk, a block, the last block of a chunk, and the last block of the last chunk.
    """
    count = -(-chunks.tokens // chunks.size)
    last = chunks.tokens - (count - 1) * chunks.size
    values = (chunks.size, last, chunks.block, _rest(chunks.size, chunks.block), _rest(last, chunks.block))
    return dict(zip(names, values, strict=True))


def _rest(tokens: int, block: int) -> int:
    """Return the number of tokens of the last block in a chunk of `tokens` tokens."""
    return tokens - (-(-tokens // block) - 1) * block


CHUNK_NAMES = ("c", "c′", "b", "b′", "b″")
HELD_OUT_NAMES = ("d", "d′", "e", "e′", "e″")


def rows_and_cu_seqlens(rows: int, name: str) -> Sizes:
    """Return the number of rows as size `name`, and the entries of cu_seqlens for two documents a row as 2`name`+1."""
    return {name: rows, f"2{name}+1": 2 * rows + 1}


def lengths(sequence: int) -> Sizes:
    """Return name -> value of the sizes that follow from a sequence length S: S, S-1, S+1, S+256, S↑n and ⌈S/n⌉."""
    near = {f"S{n:+}": sequence + n for n in (-1, 1, 256)}
    return {"S": sequence, **near, **{f"S↑{n}": -(-sequence // n) * n for n in _ROUNDED}, **tiles(sequence)}


def tiles(sequence: int) -> Sizes:
    """Return name -> value of the sizes ⌈S/n⌉ of a sequence length S."""
    return {f"⌈S/{n}⌉": -(-sequence // n) for n in _TILES}


def sizes_of(rows: int, length: int, batch: Chunks, held_out_rows: int, held_out: Chunks | None) -> Sizes:
    """Return name -> value of all sizes of a step, except the tokens of experts.

    `rows` and `held_out_rows` are those of a micro-batch and of an evaluation's batch, `batch` and `held_out` the
    division of their tokens in the loss (None without an evaluation), and `length` the tokens of a row.
    """
    sizes = {**lengths(length), **sizes_of_chunks(batch, CHUNK_NAMES), **rows_and_cu_seqlens(rows, "B")}
    if held_out is not None:
        sizes |= {**rows_and_cu_seqlens(held_out_rows, "E"), **sizes_of_chunks(held_out, HELD_OUT_NAMES)}
    return sizes


@dataclass(frozen=True)
class ExpertRows:
    """Number of tokens that each expert of a layer receives, by expert id: `trained` from a micro-batch, `held_out`
    from an evaluation's batch, empty without an evaluation."""

    trained: tuple[int, ...]
    held_out: tuple[int, ...] = ()

    @property
    def idle(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of the experts that receive no token, in a micro-batch and in an evaluation's batch."""
        of_batch, of_held_out = (
            tuple(expert for expert, count in enumerate(counts) if not count)
            for counts in (self.trained, self.held_out)
        )
        return of_batch, of_held_out

    def of(self, block: Block) -> int:
        """Return the tokens of the experts that were being computed when a block was allocated, in an evaluation or a
        micro-batch by the block's phase; 0 without experts."""
        counts = self.held_out if block.phase == "evaluation" else self.trained
        return sum(counts[expert] for expert in block.experts)


def exchanged(placed: Sequence[Sequence[int]], rows: ExpertRows) -> Sizes:
    """Return the sizes r0, r1, … and q0, q1, …: tokens sent to the experts of each `ep` rank, the ids of which are
    `placed`, from `rows`, the tokens of each expert; empty without `ep`."""
    return {
        f"{name}{rank}": sum(counts[expert] for expert in held)
        for name, counts in (("r", rows.trained), ("q", rows.held_out))
        for rank, held in enumerate(placed)
        if counts
    }


class Monomials:
    """Factors numbers of bytes into monomials of `sizes`: name -> value at probe sizes (probe.py). Of names with the
    same value the first is used; values up to 1 are ignored.

    Attributes:
        values: (value, name) of each size, largest first, which is the order of the divisions.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        first: dict[int, str] = {}
        for name, value in sizes.items():
            if value > 1:
                first.setdefault(value, name)
        self.values = sorted(((value, name) for value, name in first.items()), reverse=True)

    def of(self, nbytes: int, rows: int = 0) -> tuple[int, bool, Powers]:
        """Factor a number of bytes by dividing by each size, the largest first, as often as possible.

        `rows` are the tokens of the experts that were computed at the storage's allocation; 0 if there were none.
        Returns (coefficient, whether `rows` is a factor, monomial), whose product is `nbytes`.
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
    """Evaluate a monomial; raise `KeyError` if one of its sizes has no value."""
    product = 1
    for name, exponent in powers:
        product *= sizes[name] ** exponent
    return product


def values_of(monomials: Sequence[Powers], sizes: Mapping[str, int]) -> np.ndarray:
    """Evaluate monomials; return [monomials] int64."""
    return np.array([value_of(powers, sizes) for powers in monomials], dtype=np.int64)
