"""What would help where a run does not fit: single changes of the run file, each evaluated as the run itself is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moetune.catalog.gpus import Gpu
from moetune.config import OptimizerConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.report import Change, MemoryReport, PartName
from moetune.memory.routing import Routing
from moetune.memory.terms import beside_of_formula
from moetune.run.resolve import ResolvedRun, resolve

_EVALUATED = 3
"""How many candidates are evaluated, and up to twice as many while none fits: one of a new kind takes seconds
(closed_form/form.py)."""


class Candidate(NamedTuple):
    """One change, and the parts of the peak that it acts on."""

    settings: dict[str, object]
    why: str
    parts: tuple[PartName, ...]


def best_changes(run: ResolvedRun, report: MemoryReport, routing: Routing, card: Gpu) -> list[Change]:
    """The three that save most of the fullest rank's peak, of those that act on its largest parts. What moves to the
    host slows every step, so it comes last."""
    assert report.gpu is not None
    config, fullest = run.config, report.fullest
    if config.parallel.ranks > 1:
        return []  # the layout decides, and there are others to compare with (docs/guides/parallel.md)

    def order(candidate: Candidate) -> tuple[bool, int]:
        return is_on_host(candidate), -sum(getattr(fullest.parts, part) for part in candidate.parts)

    found: list[Change] = []
    for number, candidate in enumerate(sorted(candidates(config), key=order)):
        if number >= _EVALUATED and (number >= 2 * _EVALUATED or any(change.fits for change in found)):
            break
        try:
            changed = resolve(with_settings(config, candidate.settings), run.device_type, like=run)
            after = ClosedForm(changed, gpu=card).at(changed.config, routing)
        except (UserError, ValueError):
            continue
        peak = after.parts.total + beside_of_formula(after, card)
        saves = fullest.peak_allocated - peak
        needs = max(peak, after.load.gpu) + fullest.outside_allocator
        if saves > 0:
            names = tuple(f"{key}={value}" for key, value in candidate.settings.items())
            found.append(Change(names, saves, needs, needs <= report.gpu.usable_bytes, candidate.why))
    return sorted(found, key=lambda change: (change.fits, change.saves), reverse=True)[:3]


_ON_HOST = {"model.experts_on": "host", "train.checkpointing": "offload", "optimizer.offload": True}


def is_setting_of_host(key: str, value: object) -> bool:
    """Whether it moves something to the host, which slows every step."""
    return _ON_HOST.get(key) == value


def is_on_host(candidate: Candidate) -> bool:
    return any(is_setting_of_host(key, value) for key, value in candidate.settings.items())


_UPDATED: tuple[PartName, ...] = ("optimizer_states", "master_weights")
_ACTIVATIONS: tuple[PartName, ...] = ("saved_activations", "transient_peak")


def candidates(config: RunConfig) -> Iterator[Candidate]:
    """Single changes that may save memory."""
    train, model = config.train, config.model
    if isinstance(config.optimizer, OptimizerConfig):
        yield from _other_optimizers(config.optimizer, train.accumulate)
    if model.base not in ("nf4", "auto"):
        yield Candidate({"model.base": "nf4"}, "4 bits for what stays frozen", ("frozen_weights",))
    if model.base == "nf4" and not model.double_quant:
        why = "8 bits for the scales of what stays frozen"
        yield Candidate({"model.double_quant": True}, why, ("frozen_weights",))
    if train.checkpointing in ("none", "experts_only"):
        why = "keeps each layer's input, and computes the layer again in backward"
        yield Candidate({"train.checkpointing": "full"}, why, _ACTIVATIONS)
    if train.checkpointing != "offload":
        why = "as full, and the layers' inputs wait in host memory"
        yield Candidate({"train.checkpointing": "offload"}, why, ("saved_activations",))
    if model.experts_on != "host":
        why = "packed experts come from host memory in time; wants many tokens a step"
        yield Candidate({"model.experts_on": "host"}, why, ("frozen_weights",))
    if train.micro_batch > 1:
        settings = {"train.micro_batch": 1, "train.accumulate": train.accumulate * train.micro_batch}
        yield Candidate(dict(settings), "the same step in smaller pieces", _ACTIVATIONS)
    if config.data is not None and (train.eval_micro_batch or 0) > train.micro_batch:
        why = "evaluation in batches of the size that trains"
        yield Candidate({"train.eval_micro_batch": train.micro_batch}, why, ("transient_peak",))
    if train.sequence_length > 512:
        yield Candidate(
            {"train.sequence_length": train.sequence_length // 2}, "half as many tokens at once", _ACTIVATIONS
        )
    if config.adapt.lora is not None and config.adapt.lora.rank > 1:
        parts: tuple[PartName, ...] = ("trainable_weights", "gradients", *_UPDATED)
        yield Candidate({"adapt.lora.rank": config.adapt.lora.rank // 2}, "half the factors", parts)


def _other_optimizers(optimizer: OptimizerConfig, accumulate: int) -> Iterator[Candidate]:
    if (optimizer.name, optimizer.master_weights) != ("adamw8bit", "none"):
        yield Candidate(
            {"optimizer.name": "adamw8bit", "optimizer.master_weights": "none"},
            "8-bit AdamW keeps 2 bytes a trained parameter, and no master weights",
            _UPDATED,
        )
    if (optimizer.name, optimizer.master_weights) != ("sgd", "none"):
        settings = {"optimizer.name": "sgd", "optimizer.master_weights": "none"}
        yield Candidate(dict(settings), "SGD without momentum keeps no states", _UPDATED)
    if accumulate == 1 and not optimizer.fused_backward and not optimizer.offload:
        why = "frees each gradient as it comes; the largest one is alive, not all"
        yield Candidate({"optimizer.fused_backward": True}, why, ("gradients",))
    if not optimizer.offload and not optimizer.fused_backward and optimizer.master_weights != "stochastic":
        why = "states, float32 weights and updates in host memory"
        yield Candidate({"optimizer.offload": True}, why, ("gradients", *_UPDATED))


def with_settings(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """The run file with other values, by dotted key. An optimizer of another name begins with its own settings.

    Raises:
        ValueError: it is then no valid run file.
    """
    raw = config.model_dump(mode="json", exclude_unset=True)
    for key, value in settings.items():
        *path, last = key.split(".")
        node = raw
        for part in path:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        node[last] = value
    if settings.get("optimizer.name"):
        for key in ("betas", "eps", "momentum"):
            raw["optimizer"].pop(key, None)
    return RunConfig.model_validate(raw)
