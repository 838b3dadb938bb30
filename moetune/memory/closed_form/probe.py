"""Probe sizes: large primes, times what alignment asks for.

The bytes of a tensor then say which sizes they are a product of, because nothing else in a model is divisible by these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from moetune.memory.closed_form.sizes import MOST_ALIGNED, Shape, Sizes, lengths, sizes_of
from moetune.training.step.loss import Chunks


@dataclass(frozen=True)
class ProbeSizes:
    """The sizes of one recording: products of primes that are no size of the model's own.

    Attributes:
        batch, held_out: how the loss divides its tokens.
        idle: the experts that receive no token, of a batch and of a held-out one.
    """

    rows: int
    sequence: int
    held_out_rows: int
    batch: Chunks
    held_out: Chunks | None
    idle: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, shape: Shape, own: Collection[int], number: int) -> ProbeSizes:
        """The probe sizes of that number.

        Args:
            own: sizes of the model's tensors.
        """
        free = (p for p in primes(53) if _is_rough(2 * p + 1) and not any(size % p == 0 for size in own))
        for _ in range(number + 1):
            rows = next(free)
            held_out_rows = next(p for p in free if (2 * p + 1) % rows and (2 * rows + 1) % p)
        rows = 1 if shape.one_row else rows
        # One above a multiple of 128 pieces: what it is rounded up to then differs, whatever it is rounded to.
        shortest = 2**16 // shape.aligned if shape.one_row else 53
        candidates = (shape.aligned * p for p in primes(shortest) if p % (2 * MOST_ALIGNED // shape.aligned) == 1)
        usable = (n for n in candidates if _is_probe_length(n, {rows, held_out_rows} - {1}))
        sequence = next(islice(usable, number, None))
        held_out = probe_chunks(held_out_rows * sequence) if shape.held_out else None
        batch = probe_chunks(rows * sequence, alone=shape.is_alone)
        return cls(rows, sequence, held_out_rows, batch, held_out, shape.idle)

    def longer(self, limits: Collection[int]) -> tuple[int, ...]:
        """The limits that its length is below."""
        return tuple(sorted(limit for limit in limits if limit > self.sequence))

    def of_length(self, sequence: int, shape: Shape) -> ProbeSizes:
        """The same with sequences of this length, which need be no probe: they are only compared."""

        def chunks(rows: int, *, alone: bool = False) -> Chunks:
            tokens = rows * sequence
            size, last = (tokens, tokens) if alone else (tokens * 36 // 100, tokens - 2 * (tokens * 36 // 100))
            return Chunks(tokens, size, (size // 2 + last) // 2)

        held_out = chunks(self.held_out_rows) if shape.held_out else None
        return replace(self, sequence=sequence, batch=chunks(self.rows, alone=shape.is_alone), held_out=held_out)

    def count(self, total: int, experts: int, top_k: int, tp: int) -> list[int]:
        """The rows of each expert, of `total`."""
        return probe_rows(total, experts, self.idle[total != self.batch.tokens * top_k // tp])

    def sizes(self) -> Sizes:
        sizes = sizes_of(self.rows, self.sequence, self.batch, self.held_out_rows, self.held_out)
        # A single row is no factor, and what has its two documents is constant.
        return sizes if self.rows > 1 else {name: size for name, size in sizes.items() if name not in ("B", "2B+1")}


def primes(start: int) -> Iterator[int]:
    """The primes from a number on."""
    number = start | 1
    while True:
        if all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2)):
            yield number
        number += 2


def probe_chunks(tokens: int, *, alone: bool = False) -> Chunks:
    """A division of `tokens` with every place, or into one chunk, whose sizes can be told apart."""
    size = last = tokens
    if not alone:
        size = next(p for p in primes(int(tokens * 0.36)) if _is_large_prime_or_twice(tokens - 2 * p))
        last = tokens - 2 * size
    blocks = primes((size // 2 + last) // 2 + 1)
    block = next(p for p in blocks if all(_without_factors(n - p, 32) > 1000 for n in (size, last)))
    return Chunks(tokens, size, block)


def probe_rows(total: int, experts: int, idle: Sequence[int]) -> list[int]:
    """Numbers of rows that sum to `total`: the same prime for all, the rest for the last; 0 for experts that are
    idle."""
    busy = [expert for expert in range(experts) if expert not in idle]
    each = min(next(primes(total * 9 // (10 * len(busy)))), total // len(busy)) if len(busy) > 1 else 0
    rows = dict.fromkeys(idle, 0) | dict.fromkeys(busy, each)
    rows[busy[-1]] = total - each * (len(busy) - 1)
    assert rows[busy[-1]] > 0, "too few rows for so many experts"
    return [rows[expert] for expert in range(experts)]


def _is_probe_length(sequence: int, rows: Collection[int]) -> bool:
    """Whether no size that follows from the length is a product of small primes, or shares one with the rows."""
    return all(
        _is_rough(size) and all(size % p and size % (2 * p + 1) for p in rows) for size in lengths(sequence).values()
    )


def _is_large_prime_or_twice(number: int) -> bool:
    odd = _without_factors(number, 3)
    return odd > 1000 and next(primes(odd)) == odd


def _is_rough(number: int) -> bool:
    """Whether it has a prime factor above 50."""
    return _without_factors(number, 50) > 50


def _without_factors(number: int, below: int) -> int:
    """A number divided by all its factors below another one."""
    for divisor in range(2, below):
        while number and number % divisor == 0:
            number //= divisor
    return number
