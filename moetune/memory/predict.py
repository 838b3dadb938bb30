"""A run file becomes a memory report: traced or by formula, on one card or divided over several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from moetune.catalog.gpus import Gpu, find_gpu
from moetune.config import RunConfig, refuse_untrainable
from moetune.errors import UserError
from moetune.memory.allocator import Event, simulate
from moetune.memory.facts import Facts, read_facts
from moetune.memory.formulas import quantities, quantities_of, set_up
from moetune.memory.layout import divide
from moetune.memory.loading import load_peaks
from moetune.memory.quantities import Quantities
from moetune.memory.report import Change, GpuMemory, LoadPeaks, MemoryReport, RankMemory
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.terms import terms as terms_of
from moetune.memory.trace import Trace, trace

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
    assumptions = [
        f"routing: {routing.name}",
        f"every sequence has train.sequence_length = {config.train.sequence_length} tokens"
        + (", documents packed" if config.data is None or config.data.packing else ", some padded"),
        "memory inside a kernel is not counted, but for cuBLAS workspaces",
        *card.assumptions,
    ]
    whole, terms = None, ()
    try:
        facts = read_facts(config.model.path)
        setup = set_up(facts, config, routing=routing)
        whole, terms = quantities_of(setup), terms_of(setup)
    except UserError as error:
        if method == "formula" or not _is_trainable(config) or "has no closed form" not in str(error):
            raise
        assumptions.append(str(error))
    moment, timeline, collectives = None, (), ()
    traced = None
    if method != "formula" and _is_trainable(config):
        try:
            traced = trace(config, routing)
        except UserError as error:
            if method == "trace" or whole is None or "cannot be traced" not in str(error):
                raise
            assumptions.append(str(error))
    elif method == "trace":
        refuse_untrainable(config)
    if traced is not None:
        ranks: tuple[RankMemory, ...] = (_traced_rank(traced, card),)
        moment, timeline = traced.moment(), traced.timeline()
        assumptions.append("allocator: expandable segments, simulated on the trace")
        load = LoadPeaks(0, 0) if whole is None else load_peaks(setup, whole)
    else:
        assert whole is not None
        shares = divide(
            whole,
            config.parallel,
            checkpointing=config.train.checkpointing == "full",
            load=dict(routing.load) or None,
        )
        ranks = tuple(_formula_rank(share.rank, share.quantities, card) for share in shares)
        fullest = max(shares, key=lambda share: share.quantities.peak()[1].total)
        collectives = fullest.collectives
        assumptions += [
            f"the peak is at: {whole.peak()[0]}",
            "reserved: allocated, rounded up to a page of each pool; a trace simulates the allocator",
        ]
        load = load_peaks(setup, fullest.quantities)
    report = MemoryReport(
        model=config.model.path,
        method="formula" if traced is None else "trace",
        gpu=None if name is None else GpuMemory(card.full_name if gpu is None else name, card.memory.value),
        ranks=ranks,
        terms=terms,
        assumptions=tuple(assumptions),
        load=load,
        moment=moment,
        timeline=timeline,
        collectives=collectives,
    )
    if report.fits is False and whole is not None:
        changes = tuple(_changes(config, facts, whole, report, routing))
        notes = () if any(change.fits for change in changes) else ("no single change makes it fit; combine them",)
        report = replace(report, changes=changes, notes=notes)
    return report


def _is_trainable(config: RunConfig) -> bool:
    try:
        refuse_untrainable(config)
    except UserError:
        return False
    return True


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
    )


def _formula_rank(rank: int, share: Quantities, card: Gpu) -> RankMemory:
    _, parts = share.peak()
    parts = replace(parts, transient_peak=parts.transient_peak + _WORKSPACES * card.cublas_workspace.value)
    reserved = -(-parts.total // _PAGE) * _PAGE + _SMALL_PAGE
    return RankMemory(rank, parts, card.context.value, reserved)


def _changes(
    config: RunConfig, facts: Facts, whole: Quantities, report: MemoryReport, routing: Routing
) -> list[Change]:
    """The three single changes that save most, by formula: each is evaluated as the run file itself is."""
    before = whole.peak()[1].total
    found = []
    for settings, why in _candidates(config):
        try:
            changed = _with(config, settings)
            after = quantities(facts, changed, routing=routing).peak()[1].total
        except (UserError, ValueError):
            continue
        saves = before - after
        if saves <= 0 or report.gpu is None:
            continue
        needs = report.peak_process - saves
        found.append(
            Change(tuple(f"{k}={v}" for k, v in settings.items()), saves, needs, needs <= report.gpu.usable_bytes, why)
        )
    return sorted(found, key=lambda change: -change.saves)[:3]


def _candidates(config: RunConfig) -> Iterator[tuple[dict[str, object], str]]:
    train, optimizer, model = config.train, config.optimizer, config.model
    if (optimizer.name, optimizer.master_weights) != ("adamw8bit", "none"):
        yield (
            {"optimizer.name": "adamw8bit", "optimizer.master_weights": "none"},
            "8-bit AdamW keeps 2 bytes a trained parameter, and no master weights",
        )
    if (optimizer.name, optimizer.master_weights) != ("sgd", "none"):
        yield {"optimizer.name": "sgd", "optimizer.master_weights": "none"}, "SGD without momentum keeps no states"
    if model.base != "nf4":
        yield {"model.base": "nf4"}, "4 bits for what stays frozen"
    if model.base == "nf4" and not model.double_quant:
        yield {"model.double_quant": True}, "8 bits for the scales of what stays frozen"
    if train.checkpointing != "full":
        yield {"train.checkpointing": "full"}, "keeps each layer's input, and computes the layer again in backward"
    if train.micro_batch > 1:
        yield (
            {"train.micro_batch": 1, "train.accumulate": train.accumulate * train.micro_batch},
            "the same step in smaller pieces",
        )
    if train.sequence_length > 512:
        yield {"train.sequence_length": train.sequence_length // 2}, "half as many tokens at once"
    if config.adapt.lora is not None and config.adapt.lora.rank > 1:
        yield {"adapt.lora.rank": config.adapt.lora.rank // 2}, "half the factors"


def _with(config: RunConfig, settings: dict[str, object]) -> RunConfig:
    raw = config.model_dump(mode="json", exclude_unset=True)
    for key, value in settings.items():
        *path, last = key.split(".")
        node = raw
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    if settings.get("optimizer.name"):
        for key in ("betas", "eps", "momentum"):
            raw["optimizer"].pop(key, None)
    return RunConfig.model_validate(raw)
