"""Stages of a pipeline: what each rank holds of the model. Where `auto` cuts is decided in planning/predictor.py."""

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


def stages_of(parallel: ParallelConfig, layers: int) -> tuple[range, ...]:
    """Return the decoder layers of each stage; stage s is on the rank s % pp of the axis. `stages: auto` counts as
    equal numbers of layers: where it cuts is decided by predictions (planning/predictor.py)."""
    if parallel.stages != "auto":
        return tuple(range(start, end + 1) for start, end in parallel.stages)
    return least_stages([1] * layers, [(0, 1)] * (parallel.pp * stages_a_rank(parallel)))


def least_stages(layers: Sequence[int], stages: Sequence[tuple[int, int]]) -> tuple[range, ...]:
    """Cut decoder layers into stages so that the stage that needs most of its room needs as little as it can; of equal
    cuts the most even one is taken, and of these the one with the shortest first stages.

    Args:
        layers: bytes that each layer needs.
        stages: for each stage, the bytes that it needs beside its layers, and the bytes that it has room for.
    """
    before, count = [0, *accumulate(layers)], len(stages)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """Return, of the stages from `stage` on, given its first layer: the largest share of its room that one needs,
        the sum of the squares of the shares, and the ends."""
        if stage == count:
            return 0.0, 0.0, ()
        (beside, memory), cuts = stages[stage], []
        later = count - stage - 1
        for end in range(start + 1, len(layers) - later + 1) if later else (len(layers),):
            share = (before[end] - before[start] + beside) / memory
            largest, squares, ends = best(stage + 1, end)
            cuts.append((max(largest, share), squares + share * share, (end, *ends)))
        return min(cuts)

    ends = best(0, 0)[2]
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
