"""`rank_memory`: a rank's memory on a GPU from its trace, with that of allocator, cuBLAS, CUDA context, NCCL."""

from collections.abc import Callable
from dataclasses import replace

from moetune.config.schema import ParallelConfig
from moetune.memory.allocator import LARGE_PAGE, SMALL_PAGE, Allocator, peaks_with_holes
from moetune.memory.report import RankMemory, Term
from moetune.memory.trace import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.coordinates import Coordinates

CONNECTION = 14 << 20
"""Bytes that NCCL takes for a connection: one channel to one other rank.

NCCL allocates buffers of 10 MiB for its three protocols (NCCL_BUFFSIZE and similar settings, each rounded up to pages
of 2 MiB) and further buffers of 2 MiB. Source of the total: github.com/NVIDIA/nccl/issues/1685, where 7 ranks × 32
channels take 3.28 GB, 14.6 MB for each connection.
"""


def rank_memory(
    traced: Trace,
    card: Gpu,
    parallel: ParallelConfig,
    allocator: Allocator | None,
    matrix: int = 0,
    *,
    is_limited: bool = True,
) -> RankMemory:
    """Return the memory of one rank; its `rank` is 0, for the caller to replace. Bytes that only the allocator adds
    (rounding to 512 bytes, cuBLAS workspaces) count as `transient_peak`.

    Args:
        traced: the rank's trace.
        card: the GPU: the sizes of its memory, of its context and of a cuBLAS workspace.
        parallel: the run's ranks, for the bytes that a process takes outside the allocator.
        allocator: the allocator to simulate; None: round the allocated bytes up to whole pages of 20 MiB and add 2 MiB.
        matrix: bytes of the largest matrix that is quantized while weights are loaded (`_largest_quantized`).
        is_limited: whether the allocator may hold no more than the GPU has beside what is outside of it.
    """
    parts, outside = traced.parts(), outside_allocator(parallel, card)
    capacity = card.memory.value - outside if is_limited else None
    workspaces = traced.workspaces(card)
    if allocator is None:
        beside = sum(workspaces) + traced.rounded_peak - parts.total
        reserved = -(-(parts.total + beside) // LARGE_PAGE) * LARGE_PAGE + SMALL_PAGE
    else:
        is_expandable = allocator == "expandable"
        allocated, reserved = peaks_with_holes(
            traced.allocations, workspaces, traced.rounded_peak, matrix, expandable=is_expandable, capacity=capacity
        )
        beside = allocated - parts.total
    name = "cuBLAS workspaces; sizes rounded up to 512 bytes"
    term = Term("transient_peak", name, f"{len(workspaces)} workspaces", beside, "concepts/allocator.md")
    return RankMemory(
        rank=0,
        parts=replace(parts, transient_peak=parts.transient_peak + beside),
        outside_allocator=outside + traced.managed,
        peak_reserved=reserved,
        host_bytes=traced.host_peak,
        terms=(*traced.terms(), term),
        layers=traced.by_layer(),
        sent=sum(collective.bytes for collective in traced.collectives),
    )


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
