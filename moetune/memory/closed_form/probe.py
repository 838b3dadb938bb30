"""Choice of probe sizes: prime batch sizes and lengths, at which a tensor's bytes reveal which sizes are its factors.

Lengths are a large prime times the power of two that their alignment requires.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from moetune.memory.closed_form.sizes import MOST_ALIGNED, Shape, Sizes, lengths, sizes_of, tiles
from moetune.training.step.loss import Chunks


@dataclass(frozen=True)
class ProbeSizes:
    """Sizes at which one step is recorded, so that the bytes of its tensors can be factored into sizes.

    Attributes:
        rows, sequence: rows of a micro-batch, and tokens of a row.
        held_out_rows: rows of an evaluation's batch, if there is one.
        batch, held_out: division of the tokens of a micro-batch, and of an evaluation's batch, in the loss; None
            without an evaluation.
        idle: ids of the experts that receive no token, in a micro-batch and in an evaluation's batch.
        number: which choice this is, from 0.
        is_own: whether choices differ in the tokens of experts only.
    """

    rows: int
    sequence: int
    held_out_rows: int
    batch: Chunks
    held_out: Chunks | None
    idle: tuple[tuple[int, ...], tuple[int, ...]]
    number: int = 0
    is_own: bool = False

    @classmethod
    def of(cls, shape: Shape, own: Collection[int], number: int) -> "ProbeSizes":
        """Choose sizes to record a step of `shape` at: rows and length with large prime factors, chunks of the loss.

        `own` are the dimensions of the model's weights: rows (unless 1 by `shape`) and numbers of tiles are chosen so
        that none of these is a multiple of them. `number`, from 0, selects one of several different choices.

        A shape that serves its own sizes only (`Shape.only`) is recorded at these; choices differ in the tokens of
        experts. One that serves lengths below a limit (`Shape.longer`) is recorded at lengths between this and half of
        it, if two such lengths suit: these need no large prime factor, so other storages may be refused.
        """
        if shape.only:
            rows, sequence, size, block = shape.only[:4]
            batch, more, held_out_rows = Chunks(rows * sequence, size, block), None, 0
            if evaluated := shape.only[4:]:
                held_out_rows, _, size, block = evaluated
                more = Chunks(held_out_rows * sequence, size, block)
            return cls(rows, sequence, held_out_rows, batch, more, shape.idle, number, is_own=True)
        rows, held_out_rows = next(islice(_rows(own), number, None))
        rows = 1 if shape.one_row else rows
        # The length is 128·k + aligned: rounded up to multiples of 8, 16, … 128 it gives different numbers, except
        # where it is a multiple already.
        shortest = 2**16 // shape.aligned if shape.one_row else 53
        candidates = (shape.aligned * p for p in primes(shortest) if p % (2 * MOST_ALIGNED // shape.aligned) == 1)
        usable = (
            n
            for n in candidates
            if _suits(n, {rows, held_out_rows} - {1}, own) and all(map(_is_rough, lengths(n).values()))
        )
        sequence = next(islice(usable, number, None))
        limit = min(shape.longer, default=0)
        if sequence >= limit > 0:
            short = _below(limit, shape.aligned, own)
            if len(short) > 1:
                several, held_out_rows, sequence = short[number]
                rows = 1 if shape.one_row else several
        held_out = probe_chunks(held_out_rows * sequence) if shape.held_out else None
        batch = probe_chunks(rows * sequence, alone=shape.is_alone)
        return cls(rows, sequence, held_out_rows, batch, held_out, shape.idle, number)

    def longer(self, limits: Collection[int]) -> tuple[int, ...]:
        """Return the limits that are greater than the sequence length, ascending."""
        return tuple(sorted(limit for limit in limits if limit > self.sequence))

    def of_length(self, sequence: int, shape: Shape) -> "ProbeSizes":
        """Return these sizes, which have `shape`, with rows of `sequence` tokens. Those need not be prime: a step of
        this length only checks the monomials."""

        def chunks(rows: int, *, alone: bool = False) -> Chunks:
            tokens = rows * sequence
            size, last = (tokens, tokens) if alone else (tokens * 36 // 100, tokens - 2 * (tokens * 36 // 100))
            return Chunks(tokens, size, (size // 2 + last) // 2)

        held_out = chunks(self.held_out_rows) if shape.held_out else None
        return replace(self, sequence=sequence, batch=chunks(self.rows, alone=shape.is_alone), held_out=held_out)

    def count(self, total: int, experts: int, top_k: int, shares: int) -> list[int]:
        """Return the tokens that each of `experts` experts receives, which sum to `total`; idle experts receive none.

        `total` is tokens × `top_k` of one of the `shares` ranks that divide the tokens of a batch (`token_shares`). The
        idle experts are those of a micro-batch if `total` is a micro-batch's, else those of an evaluation's batch.
        """
        idle = self.idle[total != self.batch.tokens * top_k // shares]
        return (own_rows if self.is_own else probe_rows)(total, experts, idle, self.number)

    def sizes(self) -> Sizes:
        """Return name -> value of all sizes except tokens of experts; with a single row also without B and 2B+1. Empty
        if choices differ in the tokens of experts only."""
        if self.is_own:
            return {}
        sizes = sizes_of(self.rows, self.sequence, self.batch, self.held_out_rows, self.held_out)
        # A single row cannot be found as a factor, and the size of its cu_seqlens is constant.
        return sizes if self.rows > 1 else {name: size for name, size in sizes.items() if name not in ("B", "2B+1")}


def primes(start: int) -> Iterator[int]:
    """Yield the odd primes from `start` on, which must be greater than 1, ascending."""
    number = start | 1
    while True:
        if all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2)):
            yield number
        number += 2


def probe_chunks(tokens: int, *, alone: bool = False) -> Chunks:
    """Divide a batch's tokens for the loss, so that prime factors show whether a size is that of a chunk or a block
    (`Chunks`: the loss has the logits of a chunk in memory at once, and of a block in float32).

    There are three chunks, the last one smaller, each of a full block and a smaller rest. So every kind of chunk and
    block that a longer batch can have occurs (`sizes.PLACES`). With `alone` there is a single chunk of two blocks.
    Prime factors are greater than 1,000, or for fewer tokens than 64,000 than a 64th of these, or half of that again.
    """
    least = min(1000, tokens // 64)
    while True:
        for size, last in [(tokens, tokens)] if alone else _thirds(tokens, least):
            for block in takewhile(lambda p: p < last, primes((size // 2 + last) // 2 + 1)):  # noqa: B023
                if all(_without_factors(n - block, 32) > least for n in (size, last)):
                    return Chunks(tokens, size, block)
        least //= 2


def _thirds(tokens: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield sizes of a full chunk and of the last one, of three: a prime, and p·2ⁿ for a prime p > `least`."""
    for size in takewhile(lambda p: 2 * p < tokens, primes(int(tokens * 0.36))):
        if _is_large_prime_or_twice(tokens - 2 * size, least):
            yield size, tokens - 2 * size


def probe_rows(total: int, experts: int, idle: Sequence[int], number: int = 0) -> list[int]:
    """Return the tokens that each of `experts` experts receives, which sum to `total`.

    Experts in `idle` receive none. Each other expert receives the same prime number of tokens, or an equal share if
    that is less; the last of them receives the rest. `number` selects the smallest such prime, or the next greater
    ones, so that it differs for different numbers and totals that rise with them. Asserts that the rest is not 0.
    """
    busy = [expert for expert in range(experts) if expert not in idle]
    share = total // len(busy)
    each = min(next(islice(primes(share * 9 // 10), number, None)), share) if len(busy) > 1 else 0
    rows = dict.fromkeys(idle, 0) | dict.fromkeys(busy, each)
    rows[busy[-1]] = total - each * (len(busy) - 1)
    assert rows[busy[-1]] > 0, "too few rows for so many experts"
    return [rows[expert] for expert in range(experts)]


def own_rows(total: int, experts: int, idle: Sequence[int], number: int) -> list[int]:
    """Return the tokens that each of `experts` experts receives, which sum to `total`, as `probe_rows` for a `total`
    that is not chosen: each but the last receives a prime number of tokens below its share, or one token. `number`
    selects the greatest such number, or the next smaller ones."""
    busy = [expert for expert in range(experts) if expert not in idle]
    numbers = [n for n in range(total // len(busy), 0, -1) if n < 4 or next(primes(n)) == n]
    each = numbers[min(number, len(numbers) - 1)] if len(busy) > 1 else 0
    rows = dict.fromkeys(idle, 0) | dict.fromkeys(busy, each)
    rows[busy[-1]] = total - each * (len(busy) - 1)
    return [rows[expert] for expert in range(experts)]


def _rows(own: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of rows, of a micro-batch and of an evaluation's batch: different primes p that divide no size in
    `own`; neither divides 2·p + 1 of the other, which have prime factors above 50."""
    free = (p for p in primes(53) if _is_rough(2 * p + 1) and not any(size % p == 0 for size in own))
    for rows in free:
        yield rows, next(p for p in free if (2 * p + 1) % rows and (2 * rows + 1) % p)


def _below(limit: int, aligned: int, own: Collection[int]) -> list[tuple[int, int, int]]:
    """Return (rows of a micro-batch, rows of an evaluation's batch, length) for each length that suits, ascending, from
    half of `limit` to below it, with other rows for each length."""
    found, left = list[tuple[int, int, int]](), list(islice(_rows(own), 8))
    for sequence in range(limit // 2 + 1, limit):
        if sequence % (2 * MOST_ALIGNED) == aligned:
            pair = next((pair for pair in left if _suits(sequence, pair, own)), None)
            if pair is not None:
                found.append((*pair, sequence))
                left.remove(pair)
    return found


def _suits(sequence: int, rows: Collection[int], own: Collection[int]) -> bool:
    """Return whether a length suits: no size that `lengths` derives from it is divisible by p or 2·p + 1 for any p in
    `rows`, and no size in `own` by a number of its tiles."""
    of_length = all(size % p and size % (2 * p + 1) for p in rows for size in lengths(sequence).values())
    return of_length and all(size % count for size in own for count in tiles(sequence).values())


def _is_large_prime_or_twice(number: int, least: int) -> bool:
    """Return whether a number is p·2ⁿ for a prime p > `least` and any n ≥ 0."""
    odd = _without_factors(number, 3)
    return odd > least and next(primes(odd)) == odd


def _is_rough(number: int) -> bool:
    """Return whether a number has a prime factor above 50."""
    return _without_factors(number, 50) > 50


def _without_factors(number: int, below: int) -> int:
    """Divide a number, as often as possible, by each integer from 2 up to but not including `below`."""
    for divisor in range(2, below):
        while number and number % divisor == 0:
            number //= divisor
    return number
