"""A layout measured by real ranks and predicted without them."""

from dataclasses import dataclass

import torch

from moetune.config.schema import RunConfig
from moetune.memory.report import Collective, Parts
from moetune.memory.trace import Trace, trace
from moetune.parallel.ranks import Ranks
from tests.resolved import measure


@dataclass(frozen=True)
class Solution:
    """Of one rank: bytes at the peak, and what was sent in one step."""

    parts: Parts
    collectives: dict[tuple[str, str], tuple[int, int]]

    @property
    def peak(self) -> int:
        return self.parts.total


@dataclass(frozen=True)
class Counts:
    """What the experts received, call by call: of this rank's tokens, and from each rank."""

    left: list[list[int]]
    received: list[list[list[int]]]


def measured(config: RunConfig, ranks: Ranks) -> tuple[Solution, Counts]:
    """Real steps, as one of several processes."""
    torch.manual_seed(ranks.data_index)
    found = measure(config, "cpu", 2, ranks)
    assert found.trace is not None
    return _found(found.trace), Counts(found.counts, found.received)


def predicted(config: RunConfig, rank: int, counts: Counts) -> Solution:
    """The same steps on fake tensors, told what the experts received."""
    left, received = iter(counts.left), iter(counts.received)
    traced = trace(
        config,
        lambda *_: next(left),
        shortened=False,
        micro_steps=config.train.accumulate,
        rank=rank,
        received=lambda *_: next(received),
    )
    return _found(traced)


def _found(traced: Trace) -> Solution:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in traced.collectives:
        assert isinstance(one, Collective)
        calls, size = sums.get((one.kind, one.axis), (0, 0))
        sums[one.kind, one.axis] = calls + one.calls, size + one.bytes
    return Solution(traced.parts(traced.peak), sums)
