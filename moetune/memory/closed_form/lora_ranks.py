"""Derive the record of any rank of LoRA between two from the records of these, as experts.py does for trained experts.

The factors, their gradients and optimizer states, and the activations between two factors are proportional to the rank.
Under FSDP2, a buffer holds factors beside other weights of their layer, which add a constant. No other storage depends
on the rank. Which ones do is not assumed: both records must have the same allocations and releases, and the bytes of
each storage must be equal, proportional, or those of such a buffer. Otherwise each rank needs a record of its own, for
instance where an 8-bit optimizer keeps the states of small factors in 32 bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from moetune.memory.closed_form.experts import Unlike
from moetune.memory.closed_form.record import Record
from moetune.memory.closed_form.sizes import Powers
from moetune.memory.trace.log import Block
from moetune.run.resolve import ResolvedRun
from moetune.training.optim.saved import SMALLEST_8BIT

LOWEST, HIGHEST = 4, 64
"""Ranks that are recorded, the highest first."""
GATHERED = "empty.memory_format"
"""The operation by which FSDP2 allocates a buffer of gathered weights."""


@dataclass(frozen=True)
class LoraRanks:
    """A record of the rank `HIGHEST`, from which records of lower ranks are derived.

    Attributes:
        record: the recorded step.
        grows: [blocks] by how much a block's coefficient exceeds that of the rank `LOWEST`.
    """

    record: Record
    grows: tuple[int, ...]

    @classmethod
    def of(cls, highest: Record, lowest: Record) -> "LoraRanks":
        """Find which bytes grow with the rank by comparing two records, of the ranks `HIGHEST` and `LOWEST`.

        Raises `Unlike` if the steps allocate different storages, or a storage is neither equal nor proportional, nor a
        buffer of weights.
        """
        one, other, grows = highest.log, lowest.log, list[int]()
        if one.entries != other.entries or highest.groups != lowest.groups:
            raise Unlike("the step allocates other storages with another rank")
        for number, (mine, its) in enumerate(zip(_about(highest), _about(lowest), strict=True)):
            block, now, then = one.blocks[number], *(int(of.coefficients[number]) for of in (highest, lowest))
            is_constant = mine.experts < 0 and not mine.powers
            if is_constant:  # a size may divide the other bytes by chance: they were recorded at one choice of sizes
                its, then = replace(its, powers=(), experts=-1), other.blocks[number].bytes
            is_buffer = is_constant and block.op == GATHERED
            is_known = now == then or now * LOWEST == then * HIGHEST or (is_buffer and now > then)
            if mine != its or not is_known:
                raise Unlike(f"{block.op} in {block.module!r}: {now:,} and {then:,} bytes")
            grows.append(now - then)
        return cls(highest, tuple(grows))

    def at(self, rank: int) -> Record:
        """Return the record of a rank between `LOWEST` and `HIGHEST`. Raises `Unlike` if bytes would be no integer."""
        one, less = self.record, np.array(self.grows, dtype=np.int64) * (HIGHEST - rank)
        if (less % (HIGHEST - LOWEST) != 0).any():
            raise Unlike(f"no whole number of bytes with rank {rank}")
        coefficients = one.coefficients - less // (HIGHEST - LOWEST)
        blocks = [
            replace(block, bytes=block.bytes // was * now) if now != was else block
            for block, was, now in zip(one.log.blocks, one.coefficients.tolist(), coefficients.tolist(), strict=True)
        ]
        return replace(one, log=replace(one.log, blocks=blocks), coefficients=coefficients)


@dataclass(frozen=True)
class _About:
    """What must be equal with another rank: the block of the log but for its bytes, and columns of the `Record`."""

    block: Block
    powers: Powers
    experts: int
    layer: int
    place: int


def _about(record: Record) -> Iterator[_About]:
    """Yield for each block of a record all that must be equal with another rank: everything but its bytes."""
    rest = zip(record.log.blocks, record.monomials, record.experts, record.layers, record.places, strict=True)
    for block, monomial, *numbers in rest:
        yield _About(replace(block, bytes=0), record.powers[monomial], *map(int, numbers))


def probes_of(run: ResolvedRun) -> tuple[ResolvedRun, ResolvedRun] | None:
    """Return the run with the ranks `HIGHEST` and `LOWEST`, from whose records that of this run can be derived.

    None if this run needs a record of its own: it has no LoRA, ranks that differ by target or layer, a single rank that
    is not between these, LoRA outside of the decoder layers, where the loss depends on it, or an 8-bit optimizer and
    factors of which the lowest rank has states in 32 bits and the highest in 8.
    """
    lora, linears = run.config.adapt.lora, run.structure.lora_layers()
    if lora is None or not isinstance(lora.rank, int) or not LOWEST <= lora.rank < HIGHEST:
        return None
    chosen = [linears[path] for path in run.selection.lora_linears]
    if any(linear.layer is None for linear in chosen):
        return None
    sizes = {size for linear in chosen for size in (linear.in_features, linear.out_features)}
    if run.optimizers["lora"].name.endswith("8bit") and any(
        size * LOWEST < SMALLEST_8BIT <= size * HIGHEST for size in sizes
    ):
        return None
    return _of_rank(run, HIGHEST), _of_rank(run, LOWEST)


def _of_rank(run: ResolvedRun, rank: int) -> ResolvedRun:
    """Return the run with this rank everywhere."""
    config, chosen = run.config.but(adapt={"lora": {"rank": rank}}), run.selection
    selection = replace(chosen, ranks=dict.fromkeys(chosen.ranks, rank), lora=config.adapt.lora)
    return replace(run, config=config, selection=selection)
