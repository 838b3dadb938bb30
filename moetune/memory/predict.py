"""`predict_memory`: the memory report of a run by trace, for each of its ranks."""

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from moetune.adapt.documents import layers_with_state
from moetune.adapt.guard import as_known
from moetune.config.schema import RunConfig
from moetune.errors import counted
from moetune.memory.about import about, held_by
from moetune.memory.assumed_routing import BALANCED, UNKNOWN, AssumedRouting
from moetune.memory.equal_ranks import kinds_of_ranks
from moetune.memory.host import host_of
from moetune.memory.outside_allocator import outside_allocator
from moetune.memory.rank_memory import Allocator, allocator_here, rank_memory
from moetune.memory.report import GpuMemory, MemoryReport, RankMemory
from moetune.memory.time.estimate import Duration, duration
from moetune.memory.trace import Trace, trace
from moetune.memory.unknowns import Unknown, of_context
from moetune.models.catalog.gpus import Gpu, alike_in_size, find_gpu
from moetune.parallel.coordinates import Coordinates, data_ranks
from moetune.run.keeps import is_open
from moetune.run.resolve import AnyRun, ResolvedRun, resolve
from moetune.run.stages import bubble
from moetune.run.validation import refuse_unpredictable

Tracing = Callable[..., Trace]
"""(run, routing, rank=…, gpu=…) -> the trace of that rank on that GPU."""
_WORDS: dict[Allocator, str] = {"default": "plain segments", "expandable": "expandable segments"}


@contextmanager
def _collecting_less() -> Iterator[None]:
    """Run Python's garbage collector less often: what it frees of cycles, and when, is part of a DeepSpeed trace."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def predict_memory(
    run: AnyRun,
    *,
    gpu: str | Gpu | None = None,
    routing: AssumedRouting = UNKNOWN,
    allocator: Allocator | None = None,
    simulated: bool = True,
    tracing: Tracing = trace,
) -> MemoryReport:
    """Predict the peak memory of a run and the time of a step, by a trace. Needs no weights, no data and no GPU.

    `train.checkpointing: auto` counts as `full` and `train.keep_rows: auto` as `none`: what they become on a GPU is
    decided above, by several predictions (planning/settle.py).

    Args:
        run: the path of a run file, a configuration, or a resolved run. It is predicted for CUDA.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry. None: `hardware.gpu`; if that is not set either,
            the report has no verdict, and memory outside the allocator is that of an L40S.
        routing: assumed number of tokens that each expert receives; what it does not know widens the report's `span`.
        allocator: the configuration of torch's allocator that is simulated. None: what the environment variables set,
            else `expandable`, as in `moetune train`.
        simulated: whether the allocator is simulated. No verdict depends on it: else the reserved bytes are those
            allocated, rounded up to pages, and the report has no timeline.
        tracing: function that makes the traces; replaces `trace`.

    Raises:
        UserError: as `resolve`; the run cannot be trained or predicted; the GPU is unknown; or a DeepSpeed run is to be
            traced and DeepSpeed is not installed.
        NotTraceable: the model's own code reads values of tensors, which fake tensors do not have.
    """
    run = resolve(run, "cuda")
    report = predict_expected(run, gpu=gpu, routing=routing, allocator=allocator, simulated=simulated, tracing=tracing)
    of_another = partial(predict_expected, run, gpu=gpu, simulated=False, tracing=tracing)
    return with_routing_range(run, report, routing, lambda other: of_another(routing=other))


@_collecting_less()
def predict_expected(
    run: ResolvedRun,
    *,
    gpu: str | Gpu | None,
    routing: AssumedRouting,
    allocator: Allocator | None = None,
    simulated: bool = True,
    tracing: Tracing = trace,
) -> MemoryReport:
    """Predict as `predict_memory` does, for the assumed routing alone: the report's `span` does not know of others."""
    refuse_unpredictable(run.config)
    names = (gpu,) if gpu else run.config.hardware.names
    cards = [name if isinstance(name, Gpu) else find_gpu(name) for name in names or ("l40s",)]
    card = cards[0]
    run = as_known(run, card if names else None)
    run = run.keeping(run.keeps) if is_open(run.config.train) else run
    config = run.config
    common = {
        "model": config.model.path,
        "about": about(run, card.capability),
        "gpu": GpuMemory(gpu if isinstance(gpu, str) else card.full_name, card.memory.value) if names else None,
        "assumptions": (
            f"routing: {routing.name}" + (f", at most {routing.highest.name}" if routing.highest else ""),
            f"every sequence has train.sequence_length = {config.train.sequence_length} tokens"
            + (", of two packed documents" if config.packs else ", some padded"),
            *_by_documents(run),
            *["activations are not quantized, as the checkpoint's settings say for inference"]
            * run.model.source.quantization.has_activations,
            *dict.fromkeys(line for one in cards for line in one.assumptions),
        ),
        "notes": tuple(
            f"the kernel of {operator} is not used: torch's operations run in its place (hardware.without_kernels)"
            for operator in config.hardware.without_kernels
        ),
    }

    card_of = [cards[Coordinates.of(config.parallel, rank).pp % len(cards)] for rank in range(config.parallel.ranks)]

    # one trace for all ranks that need equal memory; which experts a rank has matters where some receive more
    kinds = kinds_of_ranks(run, by_expert=routing != BALANCED)
    quick = partial(tracing, simulated=False) if tracing is trace and not simulated else tracing
    of_kind: dict[Hashable, Trace] = {}
    for rank, kind in enumerate(kinds):
        if kind not in of_kind:
            of_kind[kind] = quick(run, routing, rank=rank, gpu=card_of[rank])
    by_rank = {rank: of_kind[kind] for rank, kind in enumerate(kinds)}
    allocator = (allocator or allocator_here("expandable")) if simulated else None
    report = _reported(run, card_of, by_rank, allocator, common)
    if names and (card := next((one for one in cards if one.bandwidth is None), card)).bandwidth is None:
        alike = ", ".join(alike_in_size(card))
        named = f"; give the name of a card of about this size: {alike}" if alike else ""
        note = f"no time estimate: a memory size does not determine a card's speed{named}"
        return replace(report, notes=(*report.notes, note))
    return report


def _by_documents(run: ResolvedRun) -> list[str]:
    """Return the assumption about layers that run document by document, as a list of one sentence; an empty list if a
    run has no such layers or does not pack."""
    layers = layers_with_state(run.model.plain) if run.config.packs else 0
    by_one = f"{counted(layers, 'layer')} with a state (Mamba, linear attention, convolution) run document by document"
    more = "by transformers' own operations: other packages' kernels differ"
    return [f"{by_one}, {more}"] * bool(layers)


def _reported(
    run: ResolvedRun, cards: list[Gpu], found: dict[int, Trace], allocator: Allocator | None, common: dict[str, Any]
) -> MemoryReport:
    """Build the report from the trace of each rank.

    Args:
        cards: the GPU of each rank.
        found: rank -> its trace. Ranks of equal memory share one `Trace` object.
        allocator: the allocator to simulate; None for none.
        common: arguments of `MemoryReport` that do not depend on the traces.
    """
    parallel = run.config.parallel
    are_unlike = len({card.name for card in cards}) > 1
    seen: dict[int, RankMemory] = {}
    ranks = []
    for rank, traced in found.items():
        if id(traced) not in seen:
            card = cards[rank]
            outside = outside_allocator(parallel, card)
            capacity = None if common["gpu"] is None else card.memory.value - outside
            seen[id(traced)] = replace(
                rank_memory(traced, card, outside, allocator, largest_quantized(run), capacity),
                holds=held_by(run, Coordinates.of(parallel, rank).pp) if parallel.pp > 1 else "",
                card=GpuMemory(card.full_name, card.memory.value) if are_unlike else None,
            )
        ranks.append(replace(seen[id(traced)], rank=rank))
    tightest = max(ranks, key=lambda rank: rank.peak_process - rank.usable)
    fullest, card = found[tightest.rank], cards[tightest.rank]
    assert fullest.load is not None
    if tightest.card is not None:
        common["gpu"] = tightest.card
    pinned = max(rank.host_bytes for rank in ranks)
    host = host_of(run.config.hardware, card, max(fullest.load.host, pinned), pinned, len(ranks))
    assumptions = list(common.pop("assumptions"))
    if len(ranks) > 1:
        assumptions.append("every rank sends the other ranks as many bytes as the traced rank sends")
    words = "not simulated" if allocator is None else f"{_WORDS[allocator]}, simulated on the trace"
    return MemoryReport(
        **common,
        ranks=tuple(ranks),
        assumptions=(*assumptions, f"allocator: {words}"),
        load=fullest.load,
        unknowns=(of_context(card),),
        host=host,
        moment=fullest.moment(),
        timeline=() if allocator is None else fullest.timeline(),
        phases=fullest.phases(),
        collectives=fullest.collectives,
        time=None if common["gpu"] is None else slowest(run.config, found, cards),
    )


def with_routing_range(
    run: ResolvedRun,
    report: MemoryReport,
    routing: AssumedRouting,
    predicted: Callable[[AssumedRouting], MemoryReport],
) -> MemoryReport:
    """Return a report that also knows, as an `Unknown`, by how much the peak is lower for `routing.lowest` and higher
    for `routing.highest`; unchanged if the routing has neither, or no layer has experts.

    The peak for a routing is that of the rank that then needs most, beyond what its GPU has if the ranks have unlike
    ones.

    Args:
        report: with `routing`; below its peak while weights are loaded no step matters.
        predicted: returns the report with another routing, for which the allocator need not be simulated.
    """
    if not (run.structure.moe_layers and (routing.lowest or routing.highest)):
        return report

    def most(of: MemoryReport) -> int:
        tensors = (rank.peak_allocated - rank.terms[-1].bytes - rank.usable for rank in of.ranks)
        return max(report.load.gpu - report.fullest.usable, *tensors)  # the last term is what the allocator adds

    peak = most(report)
    low, high = (peak if end is None else most(predicted(end)) for end in (routing.lowest, routing.highest))
    of = (routing.lowest or routing).name, (routing.highest or routing).name
    why = f"tokens of the fullest experts: {of[0]} to {of[1]}"
    unknown = Unknown("routing", max(0, peak - low), max(0, high - peak), why)
    return replace(report, unknowns=(unknown, *report.unknowns))


def time_of(config: RunConfig, traced: Trace, card: Gpu) -> Duration | None:
    """Return the estimated time of a traced step on a GPU; None if its speed is unknown or no work was counted."""
    train = config.train
    tokens = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(config.parallel)
    sent = (one.bytes for one in traced.collectives)
    return duration(traced.work, tokens, card, sent, bubble(config.parallel, train.accumulate))


def slowest(config: RunConfig, found: Mapping[int, Trace], cards: Sequence[Gpu]) -> Duration | None:
    """Return the longest `time_of` of the ranks, given the trace of each, which some may share, and its GPU."""
    first = {id(traced): rank for rank, traced in reversed([*found.items()])}
    times = [time_of(config, found[rank], cards[rank]) for rank in first.values()]
    return max((time for time in times if time is not None), key=lambda time: time.seconds.slow, default=None)


def largest_quantized(run: ResolvedRun) -> int:
    """Return the bytes, at 16 bits per weight, of the largest linear layer that is quantized on load; 0 if none."""
    sizes = (run.model.plain.get_parameter(f"{path}.weight").numel() for path in run.quantized_linears)
    return 2 * max(sizes, default=0)
