"""A run file becomes a memory report: traced or by formula, on one card or divided over several."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, Literal

from moetune.adapt.build import build, place, refuse_indivisible
from moetune.catalog.gpus import Gpu, find_gpu
from moetune.config import RunConfig, refuse_untraceable
from moetune.errors import UserError
from moetune.memory.allocator import Event, simulate
from moetune.memory.changes import best_changes
from moetune.memory.facts import NoClosedForm, read_facts
from moetune.memory.formulas import Setup, set_up
from moetune.memory.layout import RankShare, divide_run, model_states
from moetune.memory.loading import load_peaks
from moetune.memory.quantities import Tensors, total
from moetune.memory.report import GpuMemory, MemoryReport, RankMemory
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.terms import terms as terms_of
from moetune.memory.trace import NotTraceable, Trace, trace
from moetune.parallel.deepspeed import is_installed
from moetune.parallel.place import Place

Method = Literal["trace", "formula"]
_PAGE = 20 << 20  # growing segments are mapped in pages of this size, small ones in pages of 2 MiB
_SMALL_PAGE = 2 << 20
_WORKSPACES = 2
"""cuBLAS keeps one for each thread that multiplies: forward's and backward's."""


def predict(
    config: RunConfig, *, method: Method | None = None, gpu: str | None = None, routing: Routing = BALANCED
) -> MemoryReport:
    """Predicts the peak of a run, without weights, data or a GPU.

    Args:
        method: by default a trace where training can do what the run file asks for, else the formula.
        gpu: name or size, instead of `hardware.gpu`.

    Raises:
        UserError: as `build`; an unknown GPU; more ranks than there are parts to divide.
    """
    name = gpu or config.hardware.gpu
    card = find_gpu(name or "l40s")
    setup, missing = None, list[str]()
    traced: dict[int, Trace] = {}
    try:
        setup = set_up(read_facts(config.model.path), config, routing=routing)
    except NoClosedForm as error:
        if method == "formula" or not _is_traceable(config):
            raise
        missing.append(str(error))
    if config.parallel.engine == "deepspeed" and not is_installed():
        missing.append("deepspeed is not installed, so it is not traced")
    if method == "trace" or (method is None and _is_traceable(config)):
        try:
            traced = _traces(config, routing)
        except NotTraceable as error:
            if method == "trace" or setup is None:
                raise
            missing.append(str(error))
    common = {
        "model": config.model.path,
        "gpu": None if name is None else GpuMemory(card.full_name if gpu is None else name, card.memory.value),
        "terms": () if setup is None else terms_of(setup),
        "assumptions": (
            f"routing: {routing.name}",
            f"every sequence has train.sequence_length = {config.train.sequence_length} tokens"
            + (", documents packed" if config.data is None or config.data.packing else ", some padded"),
            "memory inside a kernel is not counted, but for cuBLAS workspaces",
            *card.assumptions,
            *missing,
        ),
    }
    if traced:
        report = _by_trace(traced, config, card, common)
    else:
        assert setup is not None
        report = _by_formula(setup, card, common)
    if report.fits is not False or setup is None:
        return report
    changes = tuple(best_changes(config, setup.facts, report, routing))
    notes = () if any(change.fits for change in changes) else ("no single change makes it fit; combine them",)
    return replace(report, changes=changes, notes=notes)


def _traces(config: RunConfig, routing: Routing) -> dict[int, Trace]:
    """By rank. Those that hold as much as another share its trace."""
    traces: dict[Hashable, Trace] = {}
    by_rank = {}
    for rank, kind in enumerate(kinds_of_ranks(config, by_expert=routing != BALANCED)):
        if kind not in traces:
            traces[kind] = trace(config, routing, rank=rank)
        by_rank[rank] = traces[kind]
    return by_rank


def kinds_of_ranks(config: RunConfig, *, by_expert: bool) -> list[Hashable]:
    """What a rank's memory depends on, in the order of ranks: how much trains of its experts, and where tensors do not
    divide evenly, which part of them it has.

    Args:
        by_expert: experts receive unlike numbers of tokens, so it matters which ones a rank holds.
    """
    parallel = config.parallel
    if parallel.ranks == 1:
        return [()]
    adapted = build(config, "meta")
    refuse_indivisible(adapted, parallel)
    rows = {p.shape[0] for p in adapted.model.parameters() if p.dim()}
    # DeepSpeed divides one flat tensor of all that trains, filled up so that it divides
    is_even = parallel.engine == "deepspeed" or all(size % parallel.fsdp == 0 for size in rows)
    selection, kinds = adapted.selection, []
    placed = place(config.parallel, adapted.anatomy, selection)
    for rank in range(parallel.ranks):
        at = Place.of(parallel, rank)
        held = {layer: set(of_ranks[at.ep]) for layer, of_ranks in placed.items()}
        trained = tuple(len(held[layer] & set(ids)) for layer, ids in selection.experts.items() if layer in held)
        lora = tuple(len(held[layer] & set(ids)) for layer, ids in selection.lora_experts.items() if layer in held)
        kinds.append((trained, lora, () if is_even else (at.fsdp, at.shard), at.ep if by_expert else 0))
    return kinds


def _by_trace(traces: dict[int, Trace], config: RunConfig, card: Gpu, common: dict[str, Any]) -> MemoryReport:
    seen: dict[int, RankMemory] = {}
    ranks = []
    for rank, traced in traces.items():
        known = seen.setdefault(id(traced), _traced_rank(traced, card))
        ranks.append(replace(known, rank=rank))
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
    )
    if len(ranks) > 1:
        report = _assuming(report, "every rank sends to the others what the traced one sends")
    return _assuming(report, "allocator: expandable segments, simulated on the trace")


def _by_formula(setup: Setup, card: Gpu, common: dict[str, Any]) -> MemoryReport:
    config = setup.config
    shares = divide_run(setup)
    fullest = max(shares, key=lambda share: share.quantities.peak()[1].total)
    kept = fullest.quantities
    banks = {layer.index: _stays(total(layer.experts)) for layer in kept.layers if layer.experts}
    report = MemoryReport(
        **common,
        method="formula",
        ranks=tuple(_formula_rank(share, card) for share in shares),
        load=load_peaks(setup.facts.anatomy, config, banks, _stays(kept.tensors), kept.tensors.host),
        collectives=fullest.collectives,
    )
    if config.train.router_aux_loss or config.train.router_z_loss:
        report = _assuming(report, "router losses, a few times T·E·4 bytes a layer, are in a trace only")
    return _assuming(
        report,
        f"the peak is at: {kept.peak()[0]}",
        "reserved: allocated, rounded up to a page of each pool; a trace simulates the allocator",
    )


def _assuming(report: MemoryReport, *more: str) -> MemoryReport:
    return replace(report, assumptions=(*report.assumptions, *more))


def _stays(tensors: Tensors) -> int:
    return tensors.frozen + tensors.trainable


def _is_traceable(config: RunConfig) -> bool:
    try:
        refuse_untraceable(config)
    except UserError:
        return False
    return config.parallel.engine != "deepspeed" or is_installed()


def _traced_rank(traced: Trace, card: Gpu) -> RankMemory:
    """What the allocator makes of a trace: its rounding, and the workspaces, count as transient."""

    def events() -> Iterator[Event]:
        for number in range(_WORKSPACES):
            yield -1 - number, card.cublas_workspace.value
        yield from traced.events()

    played = simulate(events(), expandable=True)
    parts = traced.parts(traced.peak)
    beside = played.peak_allocated - parts.total
    return RankMemory(
        rank=0,
        parts=replace(parts, transient_peak=parts.transient_peak + beside),
        outside_allocator=card.context.value,
        peak_reserved=played.peak_reserved,
        host_bytes=traced.host_peak,
    )


def _formula_rank(share: RankShare, card: Gpu) -> RankMemory:
    _, parts = share.quantities.peak()
    parts = replace(parts, transient_peak=parts.transient_peak + _WORKSPACES * card.cublas_workspace.value)
    reserved = -(-parts.total // _PAGE) * _PAGE + _SMALL_PAGE
    host = share.quantities.host_bytes + model_states(share.host)
    return RankMemory(share.rank, parts, card.context.value, reserved, host)
