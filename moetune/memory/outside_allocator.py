"""GPU memory outside torch's allocator: CUDA context (from gpus.yaml) and NCCL buffers."""

from collections.abc import Callable

from moetune.config.schema import ParallelConfig
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.coordinates import Coordinates

CONNECTION = 14 << 20
"""Bytes that NCCL takes for a connection: one channel to one other rank.

NCCL allocates buffers of 10 MiB for its three protocols (NCCL_BUFFSIZE and similar settings, each rounded up to pages
of 2 MiB) and further buffers of 2 MiB. Source of the total: github.com/NVIDIA/nccl/issues/1685, where 7 ranks × 32
channels take 3.28 GB, 14.6 MB for each connection.
"""


def outside_allocator(parallel: ParallelConfig, card: Gpu) -> int:
    """Return the bytes that one process takes on its GPU outside torch's allocator: CUDA context plus NCCL buffers.

    The context's size is `card.context`, which `models/catalog/gpus.yaml` lists with its source; NCCL's buffers are
    computed by `communicators`. This project measured neither.
    """
    return card.context.value + communicators(parallel, card.channels.value)


def communicators(parallel: ParallelConfig, channels: int) -> int:
    """Return the bytes of NCCL's buffers on rank 0, summed over all communicators, with `channels` channels each.

        bytes = (rings + pairs) · channels · CONNECTION

    rings: number of distinct groups of ranks with which rank 0 communicates; a ring needs one connection per channel,
    whatever its length. pairs: number of other ranks of its `ep` group, because all-to-all needs a connection to each;
    and the neighbours of a stage of a pipeline.
    """
    groups = _groups(parallel)
    rings = len(set(groups.values()) - {frozenset({0})})
    pairs = len(groups["ep"]) - 1 + min(2, parallel.pp - 1)
    return (rings + pairs) * channels * CONNECTION


def _groups(parallel: ParallelConfig) -> dict[str, frozenset[int]]:
    """Return, for each axis of the layout, the ranks with which rank 0 communicates along it, rank 0 included."""
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
        axis: frozenset(rank for rank, c in enumerate(at) if rest(c) == rest(at[0])) for axis, rest in dense.items()
    }
