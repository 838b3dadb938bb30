"""`predict_memory`: the memory report of a run by trace, for each of its ranks."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

from moetune.adapt.build import build
from moetune.adapt.documents import layers_with_state
from moetune.adapt.guard import as_known
from moetune.cache import file_of, read_cached, write_cached
from moetune.config.schema import RunConfig
from moetune.errors import counted
from moetune.memory.about import about, held_by
from moetune.memory.allocator import Allocator, allocator_here
from moetune.memory.assumed_routing import BALANCED, UNKNOWN, AssumedRouting
from moetune.memory.host import host_of
from moetune.memory.rank_memory import rank_memory
from moetune.memory.report import GpuMemory, MemoryReport, RankMemory
from moetune.memory.time.estimate import Duration, duration
from moetune.memory.trace import Trace, trace
from moetune.memory.unknowns import Unknown, of_context
from moetune.models.catalog.gpus import AMPERE, Gpu, alike_in_size, find_gpu
from moetune.parallel.coordinates import Coordinates, data_ranks, token_shares
from moetune.run.kinds import kinds_of
from moetune.run.resolve import ResolvedRun
from moetune.run.stages import bubble
from moetune.run.validation import refuse_unpredictable

Tracing = Callable[..., Trace]
"""(run, routing, rank=…, gpu=…) -> the trace of that rank on that GPU."""


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
    run: ResolvedRun,
    *,
    gpu: str | Gpu | None = None,
    routing: AssumedRouting = UNKNOWN,
    allocator: Allocator | None = None,
    simulated: bool = True,
    timed: bool = True,
    tracing: Tracing = trace,
    cached_as: object = None,
) -> MemoryReport:
    """Predict the peak memory of a run and the time of a step, by a trace. Needs no weights, no data and no GPU.

    `train.checkpointing: auto` counts as `full` and `train.keep_rows: auto` as `none`: what they become on a GPU is
    decided above, by several predictions (planning/settle.py).

    Args:
        run: a resolved run. It is predicted for CUDA.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry. None: `hardware.gpu`; if that is not set either,
            the report has no verdict, and memory outside the allocator is that of an L40S.
        routing: assumed number of tokens that each expert receives; what it does not know widens the report's `span`.
        allocator: the configuration of torch's allocator that is simulated. None: what the environment variables set,
            else `expandable`, as in `moetune train`.
        simulated: whether the allocator is simulated. No verdict depends on it: else the reserved bytes are those
            allocated, rounded up to pages, and the report has no timeline.
        timed: whether the time of a step is estimated too, where the allocator is not simulated; else it always is.
        tracing: function that makes the traces; replaces `trace`.
        cached_as: what names `tracing`, as a JSON value; with it reports are read from disk, or written there. None:
            always traced.

    Raises:
        UserError: the run cannot be trained or predicted; the GPU is unknown; or a DeepSpeed run is to be
            traced and DeepSpeed is not installed.
        NotTraceable: the model's own code reads values of tensors, which fake tensors do not have.
    """
    run = run.settled_as(None)
    refuse_unpredictable(run.config)
    run = as_known(run, cards_of(run, gpu)[0] if gpu or run.config.hardware.names else None)
    allocator = (allocator or allocator_here("expandable")) if simulated else None
    predict = partial(_predict_expected, run, gpu, tracing, cached_as)
    report = predict(routing, allocator, timed=timed or simulated)
    if not (run.structure.moe_layers and (routing.lowest or routing.highest)):
        return report

    def most(of: MemoryReport) -> int:
        """Return the bytes of the rank that needs most, beyond what its GPU has if the ranks have unlike ones."""
        tensors = (rank.peak_allocated - rank.terms[-1].bytes - rank.usable for rank in of.ranks)
        # below the peak while weights are loaded no step matters; the last term is what the allocator adds
        return max(report.load.gpu - report.fullest.usable, *tensors)

    peak = most(report)
    low, high = (
        peak if end is None else most(predict(end, None, timed=False)) for end in (routing.lowest, routing.highest)
    )
    of = (routing.lowest or routing).name, (routing.highest or routing).name
    why = f"tokens of the fullest experts: {of[0]} to {of[1]}"
    return replace(
        report, unknowns=(Unknown("routing", max(0, peak - low), max(0, high - peak), why), *report.unknowns)
    )


def cards_of(run: ResolvedRun, gpu: str | Gpu | None) -> list[Gpu]:
    """Return the GPU of all ranks, or that of each index on the axis pp: `gpu`, else `hardware.gpu`, else an L40S."""
    names = (gpu,) if gpu else run.config.hardware.names or ("l40s",)
    return [name if isinstance(name, Gpu) else find_gpu(name) for name in names]


def _predict_expected(
    run: ResolvedRun,
    gpu: str | Gpu | None,
    tracing: Tracing,
    cached_as: object,
    routing: AssumedRouting,
    allocator: Allocator | None,
    *,
    timed: bool,
) -> MemoryReport:
    """Predict for the assumed routing alone, or read from disk what was predicted before. With `allocator` None none is
    simulated."""
    depends_on = {
        "run": run.config.model_dump(mode="json", exclude={"output"}),
        "settings": [run.model.settings.to_dict(), run.model.source.config.to_dict()],
        "published": run.model.source.quantization.method,
        "gpu": [gpu if isinstance(gpu, str) else None, *map(asdict, cards_of(run, gpu))],
        "routing": asdict(routing),
        "allocator": allocator,
        "timed": timed,
        "tracing": cached_as,
    }
    file = None if cached_as is None else file_of(depends_on)
    report: MemoryReport | None = None if file is None else read_cached(file, MemoryReport)
    if report is None:
        report = _report_by_trace(run, gpu, tracing, routing, allocator, timed=timed)
        if file is not None:
            write_cached(file, MemoryReport, report)
    return report


@_collecting_less()
def _report_by_trace(
    run: ResolvedRun,
    gpu: str | Gpu | None,
    tracing: Tracing,
    routing: AssumedRouting,
    allocator: Allocator | None,
    *,
    timed: bool,
) -> MemoryReport:
    """Trace one rank of each group of ranks that need equal memory, and report all ranks."""
    config, parallel = run.config, run.config.parallel
    cards, is_named = cards_of(run, gpu), bool(gpu or config.hardware.names)
    card_of = [cards[Coordinates.of(parallel, rank).pp % len(cards)] for rank in range(parallel.ranks)]
    are_unlike = len({card.name for card in card_of}) > 1
    # which experts a rank has matters where some receive more
    kinds = kinds_of_ranks(run, by_expert=routing != BALANCED)
    quick = partial(tracing, simulated=False, timed=timed) if tracing is trace and allocator is None else tracing
    traces: dict[Hashable, Trace] = {}
    memories: dict[Hashable, RankMemory] = {}
    times: list[Duration] = []
    for rank, (kind, card) in enumerate(zip(kinds, card_of, strict=True)):
        if kind in traces:
            continue
        traced = traces[kind] = quick(run, routing, rank=rank, gpu=card)
        memory = rank_memory(traced, card, parallel, allocator, _largest_quantized(run), is_limited=is_named)
        memories[kind] = replace(
            memory,
            holds=held_by(run, Coordinates.of(parallel, rank).pp) if parallel.pp > 1 else "",
            card=GpuMemory(card.full_name, card.memory.value) if are_unlike else None,
        )
        if (time := time_of(config, traced, card)) is not None:
            times.append(time)
    ranks = tuple(replace(memories[kind], rank=rank) for rank, kind in enumerate(kinds))
    tightest = max(ranks, key=lambda rank: rank.peak_process - rank.usable)
    fullest, card = traces[kinds[tightest.rank]], card_of[tightest.rank]
    assert fullest.load is not None
    name = gpu if isinstance(gpu, str) else cards[0].full_name
    pinned = max(rank.host_bytes for rank in ranks)
    return MemoryReport(
        model=config.model.path,
        gpu=tightest.card or (GpuMemory(name, cards[0].memory.value) if is_named else None),
        ranks=ranks,
        assumptions=(*_assumptions(run, routing, cards, allocator),),
        load=fullest.load,
        moment=fullest.moment(),
        timeline=() if allocator is None else fullest.timeline(),
        collectives=fullest.collectives,
        notes=(*_notes(run, cards if is_named else []),),
        about=about(run, cards[0].capability),
        time=max(times, key=lambda time: time.seconds.slow, default=None) if is_named else None,
        unknowns=(of_context(card),),
        phases=fullest.phases(),
        host=host_of(config.hardware, card, max(fullest.load.host, pinned), pinned, len(ranks)),
    )


def _assumptions(
    run: ResolvedRun, routing: AssumedRouting, cards: list[Gpu], allocator: Allocator | None
) -> Iterator[str]:
    """Yield what a prediction assumes, one sentence each."""
    config = run.config
    yield f"routing: {routing.name}" + (f", at most {routing.highest.name}" if routing.highest else "")
    documents = ", of two packed documents" if config.packs else ", some padded"
    yield f"every sequence has train.sequence_length = {config.train.sequence_length} tokens{documents}"
    if config.packs and (layers := layers_with_state(run.model.plain)):
        by_one = (
            f"{counted(layers, 'layer')} with a state (Mamba, linear attention, convolution) run document by document"
        )
        yield f"{by_one}, by transformers' own operations: other packages' kernels differ"
    if run.model.source.quantization.has_activations:
        yield "activations are not quantized, as the checkpoint's settings say for inference"
    yield from dict.fromkeys(line for card in cards for line in card.assumptions)
    if config.parallel.ranks > 1:
        yield "every rank sends the other ranks as many bytes as the traced rank sends"
    words = {"default": "plain segments", "expandable": "expandable segments"}
    yield f"allocator: {f'{words[allocator]}, simulated on the trace' if allocator else 'not simulated'}"


def _notes(run: ResolvedRun, cards: list[Gpu]) -> Iterator[str]:
    """Yield what the user should know: kernels that are not used, a card whose speed is not known."""
    for operator in run.config.hardware.without_kernels:
        yield f"the kernel of {operator} is not used: torch's operations run in its place (hardware.without_kernels)"
    old = [card.full_name for card in cards if card.capability < AMPERE]
    if old and run.config.model.dtype in ("auto", "bf16"):
        yield f"{old[0]} has no fast bfloat16: set model.dtype: fp16"
    if (card := next((card for card in cards if card.bandwidth is None), None)) is not None:
        alike = ", ".join(alike_in_size(card))
        named = f"; give the name of a card of about this size: {alike}" if alike else ""
        yield f"no time estimate: a memory size does not determine a card's speed{named}"


def time_of(config: RunConfig, traced: Trace, card: Gpu) -> Duration | None:
    """Return the estimated time of a traced step on a GPU; None if its speed is unknown or no work was counted."""
    train = config.train
    tokens = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(config.parallel)
    sent = (collective.bytes for collective in traced.collectives)
    return duration(traced.work, tokens, card, sent, bubble(config.parallel, train.accumulate))


def _largest_quantized(run: ResolvedRun) -> int:
    """Return the bytes, at 16 bits per weight, of the largest linear layer that is quantized on load; 0 if none."""
    sizes = (run.model.plain.get_parameter(f"{path}.weight").numel() for path in run.quantized_linears)
    return 2 * max(sizes, default=0)


def kinds_of_ranks(run: ResolvedRun, *, by_expert: bool) -> list[Hashable]:
    """Return one key per rank, in rank order; ranks with equal keys need equal memory.

    A key holds the rank's stage of the pipeline; how the rank's experts of each layer train; the rank's shard if some
    trained tensor does not divide evenly among the FSDP ranks; its `tp` index if the tokens do not divide evenly among
    the tensor-parallel ranks; and with `by_expert` its `ep` index, because experts then receive different numbers of
    tokens.
    """
    parallel = run.config.parallel
    if parallel.ranks == 1:
        return [()]
    is_even, experts = _divides_evenly(run), [_experts_at(run, ep) for ep in range(parallel.ep)]
    shares_evenly = run.config.train.micro_batch * run.config.train.sequence_length % token_shares(parallel) == 0
    kinds: list[Hashable] = []
    for rank in range(parallel.ranks):
        at = Coordinates.of(parallel, rank)
        shard = () if is_even else (at.fsdp, at.shard)
        kinds.append((at.pp, experts[at.ep], shard, at.ep if by_expert else 0, 0 if shares_evenly else at.tp))
    return kinds


def _experts_at(run: ResolvedRun, ep: int) -> Hashable:
    """Return, for each layer whose experts are divided, how many of those at index `ep` train in full, and whether each
    other one, in order, has LoRA. Only neighbours of one kind are computed together (`groups_of`)."""
    layers = []
    for layer, of_ranks in run.placement.items():
        both = run.selection.experts, run.selection.lora_experts
        trained, lora = (frozenset(chosen.get(layer, ())) for chosen in both)
        if trained or lora:
            others = tuple(expert in lora for expert in of_ranks[ep] if expert not in trained)
            layers.append((len(of_ranks[ep]) - len(others), others))
    return tuple(layers)


def _divides_evenly(run: ResolvedRun) -> bool:
    """Return whether every trained tensor divides evenly among the FSDP ranks.

    A frozen tensor takes equal memory on all of them whether it does or not: FSDP2 pads the shards. The states of an
    optimizer are not padded.
    """
    parallel = run.config.parallel
    if parallel.fsdp == 1 or parallel.engine == "deepspeed":  # which pads one flat tensor of all trained parameters
        return True
    kinds, _ = kinds_of(run, 0)
    unlike = {kind: layer for layer, kind in enumerate(kinds)}  # a layer of each kind has all sizes
    short = run.without_layers(set(range(run.structure.num_layers)) - set(unlike.values()))
    shapes = (p.shape for p in build(short, "meta").model.parameters() if p.requires_grad)
    return all(shape[0] % parallel.fsdp == 0 for shape in shapes if shape)
