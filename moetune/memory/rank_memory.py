"""`rank_memory`: a rank's memory from its trace, with the caching allocator's and cuBLAS's share, and the lines of a
report that explain it."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Literal

from moetune.memory.allocator import LARGE_PAGE, POOLS, SMALL_PAGE, Event, Reserved, simulate
from moetune.memory.report import PartName, RankMemory, Term
from moetune.memory.trace import Trace
from moetune.models.catalog.gpus import Gpu

Allocator = Literal["default", "expandable"]
"""Configuration of torch's caching allocator: default segments, or `expandable_segments:True`."""

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
    traced: Trace, card: Gpu, outside: int, allocator: Allocator | None, matrix: int, capacity: int | None
) -> RankMemory:
    """Return the memory of one rank; its `rank` is 0, for the caller to replace. Bytes that only the allocator adds
    (rounding to 512 bytes, cuBLAS workspaces) count as `transient_peak`.

    Args:
        traced: the rank's trace.
        card: the GPU, for the size of a cuBLAS workspace.
        outside: bytes outside the allocator: context and NCCL buffers.
        allocator: the allocator to simulate; None: round the allocated bytes up to whole pages of 20 MiB and add 2 MiB.
        matrix: bytes of the largest matrix that is quantized while weights are loaded (`largest_quantized`).
        capacity: bytes of GPU memory that the allocator may hold; None for no limit.
    """
    parts = traced.parts()
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
