"""Stages of a pipeline: their layers; how many micro-batches are in flight (their order: parallel/pipeline.py); the
bubble."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from moetune.config.schema import ParallelConfig

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


def in_flight(parallel: ParallelConfig, rank: int, count: int) -> int:
    """Return how many micro-batches of `count` the rank with the index `rank` on the axis pp has at most between their
    forward and backward pass, over its stages together."""
    pp, virtual = parallel.pp, stages_a_rank(parallel)
    if parallel.schedule == "gpipe":
        return count
    if parallel.schedule == "1f1b":
        return min(count, pp - rank)
    a_round = count // max(1, count // pp)  # torch's order: warmup of (virtual - 1) rounds and 2 for each later rank
    return min(count * virtual, (virtual - 1) * a_round + 2 * (pp - 1 - rank) + 1)


def bubble(parallel: ParallelConfig, count: int) -> float:
    """Return the share of a step of `count` micro-batches in which a rank waits for others, if stages take equal time:
    (pp - 1) / (virtual · count + pp - 1), of `virtual` stages a rank (arXiv 2104.04473, section 2.2)."""
    waiting = parallel.pp - 1
    return waiting / (stages_a_rank(parallel) * count + waiting)
