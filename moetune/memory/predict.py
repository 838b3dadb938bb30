"""A run becomes a memory report: traced or by closed form, on one card or divided over several."""

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
from moetune.memory.closed_form.form import Evaluated
from moetune.memory.closed_form.record import NoClosedForm
from moetune.memory.outside_allocator import outside_allocator
from moetune.memory.ranks import by_kind
from moetune.memory.report import GpuMemory, MemoryReport, Moment, RankMemory, Term
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.terms import beside_of_formula, terms_of_formula, terms_of_trace
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
    """Predicts the peak of a run, and by trace how long a step takes, without weights, data or a GPU.

    Args:
        method: by default a trace.
        gpu: name or size, or a card, instead of `hardware.gpu`.
        allocator: by default as this process's environment sets it, which for `moetune` is `expandable`.
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
            + (", documents packed" if config.data is None or config.data.packing else ", some padded"),
            *card.assumptions,
        ),
    }
    if method == "formula":
        report = _by_formula(run, card, routing, depths or Depths(), common)
    else:
        report = _by_trace(run, card, routing, allocator or allocator_here(), common, tracing)
    if method != "formula" and name is not None and card.bandwidth is None:
        cards = ", ".join(alike_in_size(card))
        named = f"; the name of a card gives it, of about this size: {cards}" if cards else ""
        report = replace(report, notes=(f"no time: a size says not how fast a card is{named}",))
    if report.fits is not False or not advise:
        return report
    if config.parallel.ranks > 1:
        note = "the layout decides, and `moetune compare` shows others beside it (docs/guides/parallel.md)"
        return replace(report, notes=(*report.notes, note))
    depths = depths or Depths()

    def needs(config: RunConfig) -> MemoryReport:
        changed = resolve(config, run.device_type, like=run)
        return predict(changed, method="formula", gpu=name, routing=routing, depths=depths, advise=False)

    changes = tuple(one.change_of(report) for one in islice(fitting(config, report, needs), 3))
    notes = () if changes else ("no change of the run file is known that makes it fit",)
    return replace(report, changes=changes, notes=(*report.notes, *notes))


def allocator_here() -> Allocator:
    """As PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF sets it; torch's own default is `default`."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable" if re.search(r"expandable_segments\s*:\s*true", settings, re.IGNORECASE) else "default"


def _by_trace(
    run: ResolvedRun, card: Gpu, routing: Routing, allocator: Allocator, common: dict[str, Any], tracing: Tracing
) -> MemoryReport:
    traces: dict[int, Trace] = by_kind(run, routing, lambda rank: tracing(run, routing, rank=rank, gpu=card))
    outside = outside_allocator(run.config.parallel, card)
    capacity = None if common["gpu"] is None else card.memory.value - outside
    seen: dict[int, RankMemory] = {}
    ranks = []
    for rank, traced in traces.items():
        if id(traced) not in seen:
            seen[id(traced)] = _traced_rank(traced, card, outside, allocator, largest_packed(run), capacity)
        ranks.append(replace(seen[id(traced)], rank=rank))
    fullest = traces[max(ranks, key=lambda rank: rank.peak_process).rank]
    assert fullest.load is not None
    report = MemoryReport(
        **common,
        method="trace",
        ranks=tuple(ranks),
        load=fullest.load,
        moment=fullest.moment(),
        timeline=fullest.timeline(),
        collectives=fullest.collectives,
        time=None if common["gpu"] is None else time_of(run.config, fullest, card),
    )
    if len(ranks) > 1:
        report = _assuming(report, "every rank sends to the others what the traced one sends")
    return _assuming(report, f"allocator: {_WORDS[allocator]}, simulated on the trace")


def _by_formula(run: ResolvedRun, card: Gpu, routing: Routing, depths: Depths, common: dict[str, Any]) -> MemoryReport:
    found: dict[int, Evaluated] = by_kind(run, routing, lambda rank: depths.at(run, rank, card, routing))
    outside = outside_allocator(run.config.parallel, card)
    ranks = [_formula_rank(rank, one, card, outside) for rank, one in found.items()]
    fullest = max(ranks, key=lambda rank: rank.peak_process).rank
    mark = found[fullest].peak.mark
    moment = Moment(STEPS - 1, mark.micro_step, mark.phase, "", ())
    report = MemoryReport(**common, method="formula", ranks=tuple(ranks), load=found[fullest].load, moment=moment)
    return _assuming(report, "reserved: allocated, rounded up to a page of each pool; a trace simulates the allocator")


def _assuming(report: MemoryReport, *more: str) -> MemoryReport:
    return replace(report, assumptions=(*report.assumptions, *more))


def _traced_rank(
    traced: Trace, card: Gpu, outside: int, allocator: Allocator, matrix: int, capacity: int | None
) -> RankMemory:
    """What the allocator makes of a trace: its rounding, and the workspaces, count as transient.

    Where exactly weights lie after they were loaded is not known: what was on its way may have left a hole. It is
    played without one, with one as large as the largest matrix, and with one as large as eight; what reserves most
    counts.

    Args:
        matrix: bytes of the largest matrix that was on its way.
        capacity: bytes of the card that the allocator may have; None for any.
    """

    def events(hole: int) -> Iterator[Event]:
        for number in range(traced.workspaces):
            yield -1 - number, card.cublas_workspace.value
        yield from traced.events(hole)

    def played(capacity: int | None) -> list[Reserved]:
        return [
            simulate(events(size), expandable=allocator == "expandable", capacity=capacity)
            for size in (0, matrix, 8 * matrix)
        ]

    free = played(None)
    reserved = max(one.peak_reserved for one in free)
    if capacity is not None and reserved > capacity >= free[0].peak_allocated:
        reserved = max(one.peak_reserved for one in played(capacity))  # unused memory is given back
    parts = traced.parts(traced.peak)
    beside = free[0].peak_allocated - parts.total
    return RankMemory(
        rank=0,
        parts=replace(parts, transient_peak=parts.transient_peak + beside),
        outside_allocator=outside + traced.managed,
        peak_reserved=reserved,
        host_bytes=traced.host_peak,
        terms=(*terms_of_trace(traced), _beside(beside, traced.workspaces)),
    )


def time_of(config: RunConfig, traced: Trace, card: Gpu) -> Duration | None:
    """How long a step that was traced takes; None if nobody knows how fast the card is."""
    train = config.train
    tokens = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(config.parallel)
    return duration(traced.work, tokens, card, (one.bytes for one in traced.collectives))


def largest_packed(run: ResolvedRun) -> int:
    """Bytes in 16 bit of the largest linear layer that is packed as it is loaded."""
    sizes = (run.model.plain.get_parameter(f"{path}.weight").numel() for path in run.quantized_linears)
    return 2 * max(sizes, default=0)


def _formula_rank(rank: int, found: Evaluated, card: Gpu, outside: int) -> RankMemory:
    beside = beside_of_formula(found, card)
    parts = replace(found.parts, transient_peak=found.parts.transient_peak + beside)
    reserved = -(-parts.total // _PAGE) * _PAGE + _SMALL_PAGE
    terms = (*terms_of_formula(found), _beside(beside, WORKSPACES))
    return RankMemory(rank, parts, outside + found.managed, reserved, found.peak.host, terms)


def _beside(size: int, workspaces: int) -> Term:
    name = "cuBLAS workspaces; sizes rounded up to 512 bytes"
    return Term("transient_peak", name, f"{workspaces} workspaces", "", size, "concepts/allocator.md")


__all__ = ["Method", "NoClosedForm", "NotTraceable", "predict"]
