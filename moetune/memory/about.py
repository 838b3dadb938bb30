"""A run as text (what trains, batch, optimizer, ranks), for the head of a report."""

import sys
from collections.abc import Iterator
from datetime import date
from typing import cast

from moetune.adapt.attention import Capability, attention_in_words
from moetune.config.fields import ranges
from moetune.config.lora_rank import ranks_as_text
from moetune.config.resolved import ResolvedModelConfig
from moetune.config.schema import KeptConfig, OptimizerConfig, Storage
from moetune.errors import counted
from moetune.formats.table import format_of
from moetune.run.keeps import Kept
from moetune.run.resolve import ResolvedRun
from moetune.run.stages import bubble, in_flight

_VERSION: str = vars(sys.modules["moetune"])["__version__"]  # the package is always imported before this module


def about(run: ResolvedRun, capability: Capability | None) -> tuple[tuple[str, str], ...]:
    """Return (label, text) pairs that describe a run, in the order in which a report prints them. `capability` is the
    CUDA compute capability of its GPU; None for a CPU."""
    config, train = run.config, run.config.train
    base = base_in_words(config.model)
    batches = "1 micro-batch" if train.accumulate == 1 else f"{train.accumulate:,} micro-batches"
    step = f"{train.micro_batch} × {train.sequence_length:,} tokens, {batches} a step"
    in_order = ", layer by layer" * run.layer_by_layer
    sizes = {axis: getattr(config.parallel, axis) for axis in ("pp", "replicate", "fsdp", "ep", "tp")}
    layout = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return (
        ("trains", "; ".join(trains(run))),
        ("base", base + "".join(f", {what} on the host" for what in _on_host(run))),
        ("attention", attention_in_words(config, run.model.plain, capability)),
        ("batch", f"{step}, checkpointing {checkpointing(run)}{_experts_at_once(run)}{in_order}"),
        *([("router gradient", "dense, through all experts")] if train.dense_router_gradient else []),
        ("optimizer", optimizers(run)),
        *([("ranks", f"{config.parallel.engine}: {', '.join(layout)}")] if layout else []),
        *([("stages", stages(run))] if config.parallel.pp > 1 else []),
        ("moetune", version()),
    )


def _on_host(run: ResolvedRun) -> list[str]:
    """Return what of the frozen weights is kept in host memory."""
    experts = ["experts"] if run.config.model.experts_on == "host" else []
    return [*experts, *(path.rpartition(".")[2] for path in run.tables_on_host)]


def base_in_words(model: ResolvedModelConfig) -> str:
    """Format `model.base`, such as `nf4, double-quantized; bf16 (layer 0, experts)`."""
    label = format_of(cast(Storage, model.default_base), model.double_quant).label
    return str(model.base).replace(model.default_base, label, 1)


def version() -> str:
    """Format moetune's version and today's date, as `1.2.0, 2026-01-31`."""
    return f"{_VERSION}, {date.today().isoformat()}"


def stages(run: ResolvedRun) -> str:
    """Format the stages of a pipeline: layers and micro-batches in flight of each rank, and the bubble's share."""
    parallel = run.config.parallel
    waits = bubble(parallel, run.config.train.accumulate)
    ranks = "; ".join(held_by(run, rank) for rank in range(parallel.pp))
    return f"{parallel.schedule}: {ranks}; {waits:.0%} of a step waits for other stages"


def held_by(run: ResolvedRun, pp: int) -> str:
    """Format the layers and the micro-batches in flight of the rank with the index `pp` on the axis pp."""
    parallel = run.config.parallel
    layers = ", ".join(f"{stage.start}-{stage.stop - 1}" for stage in run.stages[pp :: parallel.pp])
    return f"layers {layers} ({in_flight(parallel, pp, run.config.train.accumulate)} in flight)"


_WORDS: dict[Kept, str] = {
    frozenset(("attention",)): "attention's output",
    frozenset(("rows",)): "rows",
    frozenset(("attention", "rows")): "attention's output and rows",
    frozenset(("rest",)): "all but rows",
    frozenset(("rest", "rows")): "everything",
}


def checkpointing(run: ResolvedRun) -> str:
    """Format what layers save for backward, such as `full, rows of 4 of 32 layers kept`."""
    train, layers = run.config.train, len(run.structure.moe_layers)
    if not isinstance(train.checkpointing, KeptConfig):
        kept = f", rows of {len(run.keeps_rows)} of {counted(layers, 'layer')} kept"
        return train.checkpointing + kept * isinstance(train.keep_rows, int)
    on_host = sum("host" in kept for kept in run.keeps.values())
    same = [kept - {"attention" if "rest" in kept else "host"} for kept in run.keeps.values()]
    counts = [f"{_WORDS[kept]} of {same.count(kept)}" for kept in _WORDS if kept in same]
    counts += [f"inputs of {on_host} on the host"] * bool(on_host)
    return f"full, kept of {counted(run.structure.num_layers, 'layer')}: {', '.join(counts)}"


def _experts_at_once(run: ResolvedRun) -> str:
    """Format a `train.expert_memory` other than `auto`; empty for a model without experts."""
    size = run.config.train.expert_memory
    if size == "auto" or not run.structure.moe_layers:
        return ""
    return ", experts one by one" if not run.expert_memory else f", experts in groups of {size}"


def trains(run: ResolvedRun) -> Iterator[str]:
    """Yield one phrase for each group of trained parameters: experts, routers, LoRA, and `adapt.also`."""
    adapt, selection = run.config.adapt, run.selection
    if selection.experts:
        count, chosen = sum(map(len, selection.experts.values())), list(selection.experts.values())
        ids = ranges(chosen[0]) if chosen.count(chosen[0]) == len(chosen) else "chosen by layer,"
        yield f"{counted(count, 'expert')}: {ids} of layers {ranges(selection.experts)}"
    if adapt.router != "none":
        yield f"routers of {'all layers' if adapt.router == 'all' else f'layers {ranges(adapt.router)}'}"
    if adapt.lora is not None:
        yield f"LoRA rank {ranks_as_text(adapt.lora.rank)} on {', '.join(adapt.lora.targets)}"
    if adapt.also:
        yield ", ".join(adapt.also)


def optimizers(run: ResolvedRun) -> str:
    """Return the optimizer's name and options as text, or `part: optimizer; …` if parts have different ones."""
    said = {part: _optimizer(optimizer) for part, optimizer in run.optimizers.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{part}: {name}" for part, name in said.items())


def _optimizer(optimizer: OptimizerConfig) -> str:
    words: list[str] = [optimizer.name]
    if optimizer.master_weights != "none":
        words.append({"fp32": "float32 master weights", "stochastic": "stochastic rounding"}[optimizer.master_weights])
    if optimizer.fused_backward:
        words.append("fused backward")
    if optimizer.offload:
        words.append("on the host")
    return ", ".join(words)
