"""What would help where a run does not fit: single changes of the run file, each evaluated as the run itself is."""

from __future__ import annotations

from collections.abc import Iterator

from moetune.config import OptimizerConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.facts import Facts
from moetune.memory.formulas import quantities
from moetune.memory.report import Change, MemoryReport
from moetune.memory.routing import Routing


def best_changes(config: RunConfig, facts: Facts, report: MemoryReport, routing: Routing) -> list[Change]:
    """The three that save most of one undivided rank's peak, by formula. What moves to the host slows every step, so it
    is named only where nothing else is enough."""
    if report.gpu is None:
        return []
    before = quantities(facts, config, routing=routing).peak()[1].total
    found = []
    for settings, why in _candidates(config):
        try:
            saves = before - quantities(facts, _with(config, settings), routing=routing).peak()[1].total
        except (UserError, ValueError):
            continue
        if saves > 0:
            needs = report.peak_process - saves
            names = tuple(f"{key}={value}" for key, value in settings.items())
            found.append(Change(names, saves, needs, needs <= report.gpu.usable_bytes, why))
    found.sort(key=lambda change: -change.saves)
    stays = [change for change in found if not _ON_HOST & set(change.settings)]
    return (stays if any(change.fits for change in stays) else found)[:3]


_ON_HOST = {"model.experts_on=host", "train.checkpointing=offload", "optimizer.offload=True"}


def _candidates(config: RunConfig) -> Iterator[tuple[dict[str, object], str]]:
    train, model = config.train, config.model
    if isinstance(config.optimizer, OptimizerConfig):
        yield from _other_optimizers(config.optimizer, train.accumulate)
    if model.base != "nf4":
        yield {"model.base": "nf4"}, "4 bits for what stays frozen"
    if model.base == "nf4" and not model.double_quant:
        yield {"model.double_quant": True}, "8 bits for the scales of what stays frozen"
    if train.checkpointing == "none":
        yield {"train.checkpointing": "experts_only"}, "computes the experts again in backward, and keeps all else"
    if train.checkpointing in ("none", "experts_only"):
        yield {"train.checkpointing": "full"}, "keeps each layer's input, and computes the layer again in backward"
    if train.checkpointing != "offload":
        yield {"train.checkpointing": "offload"}, "as full, and the layers' inputs wait in host memory"
    if model.experts_on != "host":
        yield {"model.experts_on": "host"}, "packed experts come from host memory in time; wants many tokens a step"
    if train.micro_batch > 1:
        yield (
            {"train.micro_batch": 1, "train.accumulate": train.accumulate * train.micro_batch},
            "the same step in smaller pieces",
        )
    if config.data is not None and (train.eval_micro_batch or 0) > train.micro_batch:
        yield {"train.eval_micro_batch": train.micro_batch}, "evaluation in batches of the size that trains"
    if train.sequence_length > 512:
        yield {"train.sequence_length": train.sequence_length // 2}, "half as many tokens at once"
    if config.adapt.lora is not None and config.adapt.lora.rank > 1:
        yield {"adapt.lora.rank": config.adapt.lora.rank // 2}, "half the factors"


def _other_optimizers(optimizer: OptimizerConfig, accumulate: int) -> Iterator[tuple[dict[str, object], str]]:
    if (optimizer.name, optimizer.master_weights) != ("adamw8bit", "none"):
        yield (
            {"optimizer.name": "adamw8bit", "optimizer.master_weights": "none"},
            "8-bit AdamW keeps 2 bytes a trained parameter, and no master weights",
        )
    if (optimizer.name, optimizer.master_weights) != ("sgd", "none"):
        yield {"optimizer.name": "sgd", "optimizer.master_weights": "none"}, "SGD without momentum keeps no states"
    if accumulate == 1 and not optimizer.fused_backward and not optimizer.offload:
        yield {"optimizer.fused_backward": True}, "uses each gradient up as it comes; the largest one is alive, not all"
    if not optimizer.offload and not optimizer.fused_backward and optimizer.master_weights != "stochastic":
        yield {"optimizer.offload": True}, "states, float32 weights and updates in host memory"


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
