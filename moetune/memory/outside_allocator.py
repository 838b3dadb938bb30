"""Device memory of a process outside torch's allocator: the CUDA context, and NCCL's buffers."""

from __future__ import annotations

from collections.abc import Callable

from moetune.config.schema import ParallelConfig
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.coordinates import Coordinates

CONNECTION = 14 << 20
"""Bytes that NCCL takes for one channel to one other rank. Of its own it allocates buffers of 10 MiB, for all three
protocols (NCCL_BUFFSIZE and the like, rounded up to pages of 2 MiB), and of 2 MiB (github.com/NVIDIA/nccl/issues/1685,
where 7 ranks x 32 channels take 3.28 GB: 14.6 MB each)."""


def outside_allocator(parallel: ParallelConfig, card: Gpu) -> int:
    """Bytes of the context and of NCCL's buffers. Not measured by us; each figure has its source."""
    return card.context.value + communicators(parallel, card.channels.value)


def communicators(parallel: ParallelConfig, channels: int) -> int:
    """Bytes of the buffers of all communicators of the first rank, one for each set of ranks that it talks to.

    A ring has one connection a channel, whatever its length; experts' tokens go from each rank to each.
    """
    groups = _groups(parallel)
    rings = len(set(groups.values()) - {frozenset({0})})
    pairs = len(groups["ep"]) - 1
    return (rings + pairs) * channels * CONNECTION


def _groups(parallel: ParallelConfig) -> dict[str, frozenset[int]]:
    """Ranks that communicate with the first one, by axis: those that differ from it along this axis alone."""
    at = [Coordinates.of(parallel, rank) for rank in range(parallel.ranks)]
    dense: dict[str, Callable[[Coordinates], tuple[int, ...]]] = {
        "all": lambda c: (),
        "replicate": lambda c: (c.pp, c.fsdp, c.tp),
        "fsdp": lambda c: (c.pp, c.replicate, c.tp),
        "tp": lambda c: (c.pp, c.replicate, c.fsdp),
        "data": lambda c: (c.pp, c.tp),
        "ep": lambda c: (c.pp, c.shard, c.copy),
    }
    if parallel.ep > 1:
        dense |= {"shard": lambda c: (c.pp, c.ep, c.copy), "copy": lambda c: (c.pp, c.ep, c.shard)}
    return {
        axis: frozenset(rank for rank, one in enumerate(at) if others(one) == others(at[0]))
        for axis, others in dense.items()
    }
