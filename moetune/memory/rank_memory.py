"""`rank_memory`: a rank's memory from its trace, with the share of allocator, cuBLAS, context and NCCL; the lines that
explain it."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Literal

from moetune.config.schema import ParallelConfig
from moetune.memory.allocator import LARGE_PAGE, POOLS, SMALL_PAGE, Event, Reserved, simulate
from moetune.memory.report import PartName, RankMemory, Term
from moetune.memory.trace import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.coordinates import Coordinates

Allocator = Literal["default", "expandable"]
"""Configuration of torch's caching allocator: default segments, or `expandable_segments:True`."""

CONNECTION = 14 << 20
"""Bytes that NCCL takes for a connection: one channel to one other rank.

NCCL allocates buffers of 10 MiB for its three protocols (NCCL_BUFFSIZE and similar settings, each rounded up to pages
of 2 MiB) and further buffers of 2 MiB. Source of the total: github.com/NVIDIA/nccl/issues/1685, where 7 ranks × 32
channels take 3.28 GB, 14.6 MB for each connection.
"""

# Part of the peak -> the page in docs/concepts that explains it.
_PAGES: dict[PartName, str] = {
    "frozen_weights": "weights",
    "trainable_weights": "weights",
    "gradients": "optimizers",
    "optimizer_states": "optimizers",
    "master_weights": "optimizers",
    "saved_activations": "activations",
    "transient_peak": "activations",
}


def allocator_here(unset: Allocator = "default") -> Allocator:
    """Return the allocator that PYTORCH_ALLOC_CONF or else PYTORCH_CUDA_ALLOC_CONF configures; `unset` if neither is
    set."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if settings is None:
        return unset
    return "expandable" if re.search(r"expandable_segments\s*:\s*true", settings, re.IGNORECASE) else "default"


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
    workspaces = traced.workspaces
    if allocator is None:
        beside = workspaces * card.cublas_workspace.value + traced.rounded_peak - parts.total
        reserved = -(-(parts.total + beside) // LARGE_PAGE) * LARGE_PAGE + SMALL_PAGE
    else:
        allocated, reserved = _simulated(traced, card, allocator == "expandable", matrix, capacity)
        beside = allocated - parts.total
    name = "cuBLAS workspaces; sizes rounded up to 512 bytes"
    term = Term("transient_peak", name, f"{workspaces} workspaces", beside, "concepts/allocator.md")
    return RankMemory(
        rank=0,
        parts=replace(parts, transient_peak=parts.transient_peak + beside),
        outside_allocator=outside + traced.managed,
        peak_reserved=reserved,
        host_bytes=traced.host_peak,
        terms=(*terms_of(traced), term),
        layers=traced.by_layer(),
        sent=sum(collective.bytes for collective in traced.collectives),
    )


def _simulated(traced: Trace, card: Gpu, expandable: bool, matrix: int, capacity: int | None) -> tuple[int, int]:
    """Simulate the allocator on a trace; return the peaks of allocated and of reserved bytes.

    Loading may leave a hole between the weights, so the largest reserved peak of three simulations is returned: with
    holes of 0, `matrix` and 8 · `matrix` bytes. If only the reserved bytes exceed `capacity`, the simulations that do
    are repeated with this limit, at which the allocator returns unused memory to the driver; if one fails even so, the
    bytes that it would have reserved count.
    """
    workspace, holes = card.cublas_workspace.value, (0, matrix, 8 * matrix)

    def events(hole: int, sizes: tuple[int, int] | None = None) -> Iterator[Event]:
        for number in range(traced.workspaces):
            if sizes is None or sizes[0] <= workspace <= sizes[1]:
                yield -1 - number, workspace
        yield from traced.allocations(hole, sizes)

    def played(hole: int, capacity: int | None) -> Reserved:
        return simulate(events(hole), expandable=expandable, capacity=capacity)

    @cache
    def of_pool(sizes: tuple[int, int], hole: int) -> int:
        return simulate(events(hole, sizes), expandable=expandable).peak_reserved

    if expandable:  # without a limit neither pool changes the other, and blocks are as large as what was requested
        allocated = traced.rounded_peak + traced.workspaces * workspace
        free = [sum(of_pool((low, high), hole if low <= hole <= high else 0) for low, high in POOLS) for hole in holes]
    else:
        unlimited = [played(hole, None) for hole in holes]
        allocated, free = unlimited[0].peak_allocated, [simulated.peak_reserved for simulated in unlimited]
    if capacity is None or not max(free) > capacity >= allocated:
        return allocated, max(free)
    most = 0
    for hole, reserved in zip(holes, free, strict=True):
        if reserved > capacity:
            limited = played(hole, capacity)
            if not limited.fits:
                return allocated, max(free)
            reserved = limited.peak_reserved
        most = max(most, reserved)
    return allocated, most


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


def terms_of(traced: Trace) -> Iterator[Term]:
    """Yield the lines that explain the peak of a trace, largest first; within a part they sum to that part.

    Storages form a line if they belong to the same part and were made by the same operation in the same kind of module,
    in any layer.
    """
    lines: dict[tuple[PartName, str], list[int]] = {}
    alive = traced.alive()
    for number, size in zip(traced.events.like[alive].tolist(), traced.bytes[alive].tolist(), strict=True):
        block = traced.log.blocks[number]
        label = ": ".join(filter(None, (_kind(block.module), block.op))) or "of all layers"
        lines.setdefault((block.part, label), []).append(size)
    terms = (
        Term(part, name, f"{len(sizes):,} storages", sum(sizes), f"concepts/{_PAGES[part]}.md")
        for (part, name), sizes in lines.items()
    )
    yield from sorted((term for term in terms if term.bytes), key=lambda term: -term.bytes)


def _kind(module: str) -> str:
    """Return a module's path without the prefix up to the layer number, so that all layers have the same name."""
    return re.sub(r"(?:^|.*\.)\d+\.?", "", module)
