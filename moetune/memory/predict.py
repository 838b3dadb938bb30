"""The memory report of a run: traced or by closed form, on one card or divided over several."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from moetune.config.schema import RunConfig
from moetune.memory.about import about
from moetune.memory.allocator import WORKSPACES, Event, Reserved, simulate
from moetune.memory.changes import fitting
from moetune.memory.closed_form.depth import Depths
from moetune.memory.closed_form.record import NoClosedForm
from moetune.memory.outside_allocator import outside_allocator
from moetune.memory.ranks import by_kind
from moetune.memory.report import GpuMemory, MemoryReport, RankMemory, Term
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.terms import terms_of
from moetune.memory.time.roofline import Duration, duration
from moetune.memory.trace import NotTraceable, Trace, trace
from moetune.memory.trace.steps import STEPS
from moetune.models.catalog.gpus import Gpu, alike_in_size, find_gpu
from moetune.parallel.coordinates import data_ranks
from moetune.run.resolve import AnyRun, ResolvedRun, resolve
from moetune.run.validation import refuse_unpredictable

Method = Literal["trace", "formula"]
Allocator = Literal["default", "expandable"]
"""Torch's caching allocator: with segments of a size of their own, or with such that grow."""
Tracing = Callable[..., Trace]
"""(a run, the routing, `rank`, `gpu`) -> what it makes there, watched."""
_PAGE = 20 << 20  # growing segments are mapped in pages of this size, small ones in pages of 2 MiB
_SMALL_PAGE = 2 << 20
_WORDS: dict[Allocator, str] = {"default": "plain segments", "expandable": "expandable segments"}


def predict(
    run: AnyRun,
    *,
    method: Method | None = None,
    gpu: str | Gpu | None = None,
    routing: Routing = BALANCED,
    allocator: Allocator | None = None,
    depths: Depths | None = None,
    advise: bool = True,
    tracing: Tracing = trace,
) -> MemoryReport:
    """Predict the peak of a run, and by trace how long a step takes, without weights, data or a GPU.

    Args:
        method: by default a trace.
        gpu: name or size, or a card, instead of `hardware.gpu`.
        allocator: by default that of `moetune train`: `expandable`, unless the environment says otherwise.
        depths: what runs that differ in their number of layers share by closed form.
        advise: where it does not fit, look for changes that would make it.
        tracing: what is traced: the trainer's steps.

    Raises:
        UserError: as `resolve`; what cannot be trained or predicted; an unknown GPU; DeepSpeed is to be traced and not
            installed.
        NotTraceable: the model's own code looks at values.
        NoClosedForm: it has none; a trace serves.
    """
    run = resolve(run, "cuda")
    refuse_unpredictable(run.config)
    config = run.config
    name = gpu or config.hardware.gpu
    card = name if isinstance(name, Gpu) else find_gpu(name or "l40s")
    common = {
        "model": config.model.path,
        "about": about(run),
        "gpu": None if name is None else GpuMemory(gpu if isinstance(gpu, str) else card.full_name, card.memory.value),
        "assumptions": (
            f"routing: {routing.name}",
            f"every sequence has train.sequence_length = {config.train.sequence_length} tokens"
            + (", documents packed" if config.packs else ", some padded"),
            *card.assumptions,
        ),
    }
    depths = depths or Depths()
    if method == "formula":
        report = _reported(
            run, card, by_kind(run, routing, lambda rank: depths.at(run, rank, card, routing)), None, common
        )
    else:
        traces = by_kind(run, routing, lambda rank: tracing(run, routing, rank=rank, gpu=card))
        report = _reported(run, card, traces, allocator or allocator_here("expandable"), common)
    if method != "formula" and name is not None and card.bandwidth is None:
        cards = ", ".join(alike_in_size(card))
        named = f"; the name of a card gives it, of about this size: {cards}" if cards else ""
        report = replace(report, notes=(f"no time: a size says not how fast a card is{named}",))
    if report.fits is not False or not advise:
        return report
    if config.parallel.ranks > 1:
        note = "the layout decides, and `moetune compare` shows others beside it (docs/guides/parallel.md)"
        return replace(report, notes=(*report.notes, note))

    def needs(config: RunConfig) -> MemoryReport:
        changed = resolve(config, run.device_type, like=run)
        return predict(changed, method="formula", gpu=name, routing=routing, depths=depths, advise=False)

    changes = tuple(one.change_of(report) for one in islice(fitting(config, report, needs), 3))
    notes = () if changes else ("no change of the run file is known that makes it fit",)
    return replace(report, changes=changes, notes=(*report.notes, *notes))


def allocator_here(unset: Allocator = "default") -> Allocator:
    """Return the allocator that PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF sets, or `unset`: by default torch's."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if settings is None:
        return unset
    return "expandable" if re.search(r"expandable_segments\s*:\s*true", settings, re.IGNORECASE) else "default"


def _reported(
    run: ResolvedRun, card: Gpu, found: dict[int, Trace], allocator: Allocator | None, common: dict[str, Any]
) -> MemoryReport:
    """A report on what was found by rank.

    Args:
        allocator: of traces; None: found by closed form.
    """
    outside = outside_allocator(run.config.parallel, card)
    capacity = None if common["gpu"] is None else card.memory.value - outside
    seen: dict[int, RankMemory] = {}
    ranks = []
    for rank, one in found.items():
        if id(one) not in seen:
            seen[id(one)] = _rank(one, card, outside, allocator, largest_packed(run), capacity)
        ranks.append(replace(seen[id(one)], rank=rank))
    fullest = found[max(ranks, key=lambda rank: rank.peak_process).rank]
    assert fullest.load is not None
    common |= {"ranks": tuple(ranks), "load": fullest.load}
    if allocator is None:
        assumed = "reserved: allocated, rounded up to a page of each pool; a trace simulates the allocator"
        moment = replace(fullest.moment(0), step=STEPS - 1, module="")
        return _assuming(MemoryReport(**common, method="formula", moment=moment), assumed)
    report = MemoryReport(
        **common,
        method="trace",
        moment=fullest.moment(),
        timeline=fullest.timeline(),
        collectives=fullest.collectives,
        time=None if common["gpu"] is None else time_of(run.config, fullest, card),
    )
    if len(ranks) > 1:
        report = _assuming(report, "every rank sends to the others what the traced one sends")
    return _assuming(report, f"allocator: {_WORDS[allocator]}, simulated on the trace")


def _assuming(report: MemoryReport, *more: str) -> MemoryReport:
    return replace(report, assumptions=(*report.assumptions, *more))


def _rank(
    found: Trace, card: Gpu, outside: int, allocator: Allocator | None, matrix: int, capacity: int | None
) -> RankMemory:
    """One rank's bytes. What the allocator adds, its rounding and cuBLAS's workspaces, counts as transient.

    Args:
        allocator: None: what it reserves is rounded up, not simulated.
        matrix: bytes of the largest matrix that was on its way while weights were loaded.
        capacity: bytes of the card that the allocator may have; None for any.
    """
    parts = found.parts()
    if allocator is None:
        workspaces = WORKSPACES
        beside = workspaces * card.cublas_workspace.value + found.rounded_peak - parts.total
        reserved = -(-(parts.total + beside) // _PAGE) * _PAGE + _SMALL_PAGE
    else:
        workspaces = found.workspaces
        allocated, reserved = _simulated(found, card, allocator == "expandable", matrix, capacity)
        beside = allocated - parts.total
    name = "cuBLAS workspaces; sizes rounded up to 512 bytes"
    term = Term("transient_peak", name, f"{workspaces} workspaces", "", beside, "concepts/allocator.md")
    return RankMemory(
        rank=0,
        parts=replace(parts, transient_peak=parts.transient_peak + beside),
        outside_allocator=outside + found.managed,
        peak_reserved=reserved,
        host_bytes=found.host_peak,
        terms=(*terms_of(found), term),
    )


def _simulated(traced: Trace, card: Gpu, expandable: bool, matrix: int, capacity: int | None) -> tuple[int, int]:
    """Peaks of allocated and reserved bytes, by simulation of the allocator.

    Loading may leave a hole between the weights. The simulation runs without one, with one as large as the largest
    matrix, and with one as large as eight; the largest reservation counts.
    """

    def events(hole: int) -> Iterator[Event]:
        for number in range(traced.workspaces):
            yield -1 - number, card.cublas_workspace.value
        yield from traced.allocations(hole)

    def played(capacity: int | None) -> list[Reserved]:
        return [simulate(events(size), expandable=expandable, capacity=capacity) for size in (0, matrix, 8 * matrix)]

    free = played(None)
    reserved = max(one.peak_reserved for one in free)
    if capacity is not None and reserved > capacity >= free[0].peak_allocated:
        reserved = max(one.peak_reserved for one in played(capacity))  # unused memory is given back
    return free[0].peak_allocated, reserved


def time_of(config: RunConfig, traced: Trace, card: Gpu) -> Duration | None:
    """Time of a traced step; None if the speed of the card is not known."""
    train = config.train
    tokens = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(config.parallel)
    return duration(traced.work, tokens, card, (one.bytes for one in traced.collectives))


def largest_packed(run: ResolvedRun) -> int:
    """Bytes in 16 bit of the largest linear layer that is packed as it is loaded."""
    sizes = (run.model.plain.get_parameter(f"{path}.weight").numel() for path in run.quantized_linears)
    return 2 * max(sizes, default=0)


__all__ = ["Method", "NoClosedForm", "NotTraceable", "predict"]
