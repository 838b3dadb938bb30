"""Stages of a pipeline: which decoder layers, and what outside of them, each rank of the axis `pp` holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

from moetune.config.schema import ParallelConfig
from moetune.models.structure import ModelStructure

_VIRTUAL = 2
"""Stages of each rank with `schedule: interleaved1f1b` and `stages: auto`."""


def stages_a_rank(parallel: ParallelConfig) -> int:
    """Return the number of stages that a rank has: more than 1 only with `schedule: interleaved1f1b`."""
    if parallel.schedule != "interleaved1f1b":
        return 1
    return _VIRTUAL if parallel.stages == "auto" else len(parallel.stages) // parallel.pp


def stages_of(parallel: ParallelConfig, layers: Sequence[int], first: int, last: int) -> tuple[range, ...]:
    """Return the decoder layers of each stage; stage s is on the rank s % pp of the axis.

    With `stages: auto` the stage that weighs most weighs as little as it can. Of equal cuts the one with the shortest
    first stages is taken, because these have the most micro-batches in flight.

    Args:
        layers: what each layer weighs, in bytes.
        first, last: what the first and the last stage weigh beside their layers.
    """
    if parallel.stages != "auto":
        return tuple(range(start, end + 1) for start, end in parallel.stages)
    count = parallel.pp * stages_a_rank(parallel)
    before = [0, *accumulate(layers)]

    @cache
    def best(stage: int, start: int) -> tuple[int, tuple[int, ...]]:
        """Return the least weight of the heaviest of the stages from `stage` on, given its first layer, and the ends
        of these stages."""
        beside = first * (stage == 0) + last * (stage == count - 1)
        if stage == count - 1:
            return before[-1] - before[start] + beside, (len(layers),)
        cuts = []
        for end in range(start + 1, len(layers) - count + stage + 2):
            heaviest, ends = best(stage + 1, end)
            cuts.append((max(heaviest, before[end] - before[start] + beside), (end, *ends)))
        return min(cuts)

    _, ends = best(0, 0)
    return tuple(range(start, end) for start, end in zip((0, *ends), ends, strict=False))


@dataclass(frozen=True)
class Held:
    """What one rank of a pipeline holds.

    Attributes:
        layers: indices of its decoder layers, of all its stages.
        is_first: whether it has the first stage, with the embedding.
        is_last: whether it has the last stage, with the final norm and the LM head.
    """

    layers: frozenset[int]
    is_first: bool
    is_last: bool

    @classmethod
    def at(cls, stages: tuple[range, ...], pp: int, rank: int) -> "Held":
        """Return what the rank with the index `rank` of `pp` on the axis holds."""
        mine = stages[rank::pp]
        return cls(frozenset(layer for stage in mine for layer in stage), rank == 0, rank == (len(stages) - 1) % pp)

    def has_outside(self, name: str, structure: ModelStructure, embedding: str) -> bool:
        """Return whether it holds a parameter outside of the decoder layers, given that of the input embedding."""
        if name == embedding:
            return self.is_first or (self.is_last and embedding in structure.tied.values())
        return self.is_last


def in_flight(
    schedule: Literal["1f1b", "gpipe", "interleaved1f1b"], pp: int, rank: int, virtual: int, count: int
) -> int:
    """Return how many micro-batches of `count` a rank has at most between their forward and backward pass, over its
    `virtual` stages together."""
    if schedule == "gpipe":
        return count
    if schedule == "1f1b":
        return min(count, pp - rank)
    a_round = count // max(1, count // pp)  # torch's order: warmup of (virtual - 1) rounds and 2 for each later rank
    return min(count * virtual, (virtual - 1) * a_round + 2 * (pp - 1 - rank) + 1)


def bubble(pp: int, virtual: int, count: int) -> float:
    """Return the share of a step of `count` micro-batches in which a rank waits for others, if stages take equal time:
    (pp - 1) / (virtual · count + pp - 1) (arXiv 2104.04473, section 2.2)."""
    return (pp - 1) / (virtual * count + pp - 1)
