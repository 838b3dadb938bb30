"""What makes a run fit that does not: changes of the run file, each evaluated as the run itself is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from moetune.config.schema import OptimizerConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.report import Change, MemoryReport, PartName

Evaluate = Callable[[RunConfig], MemoryReport]


class Candidate(NamedTuple):
    """One change, and the parts of the peak that it acts on."""

    settings: dict[str, object]
    why: str
    parts: tuple[PartName, ...]


@dataclass(frozen=True)
class Combination:
    """Changes of a run file, one or several together, why each helps, and what the run then needs."""

    settings: dict[str, object]
    why: tuple[str, ...]
    report: MemoryReport

    @property
    def flags(self) -> tuple[str, ...]:
        """As `--set` takes them."""
        return tuple(f"{key}={value}" for key, value in self.settings.items())

    def change_of(self, before: MemoryReport) -> Change:
        needs = self.report.required
        return Change(self.flags, before.required - needs, needs, self.report.fits is True, "; ".join(self.why))


def fitting(config: RunConfig, report: MemoryReport, needs: Evaluate) -> Iterator[Combination]:
    """Single changes with which a run fits, the mildest first; if no single one is enough, changes that are enough
    together, none of which can be left out. Nothing if none are known.

    Args:
        report: of the run, which does not fit.
        needs: evaluates a run file on the card of `report`.
    """
    if report.headroom_bytes is None or report.headroom_bytes + report.required <= report.fullest.outside_allocator:
        return  # whatever the run file says
    single = False
    for one in candidates(config):
        if _alive(one, report) + report.fullest.parts.transient_peak < _lacking(report):
            continue  # even without these parts it would not fit
        if (found := _with(config, [one], needs)) is not None and found.report.fits:
            single = True
            yield found
    if not single and (together := _together(config, report, needs)) is not None:
        yield together


def _together(config: RunConfig, report: MemoryReport, needs: Evaluate) -> Combination | None:
    """The mildest change that saves, and so on until it fits; then those that are not needed are left out, the least
    mild first. What acts on less than a hundredth of what is lacking is not worth a try."""
    taken: list[Candidate] = []
    refused: list[Candidate] = []
    now = Combination({}, (), report)
    while now.report.fits is False:
        there = candidates(changed(config, now.settings))
        least = _lacking(now.report) // 100
        one = next((one for one in there if one not in refused and _alive(one, now.report) > least), None)
        if one is None:
            return None
        refused.append(one)
        after = _with(config, [*taken, one], needs)
        if after is not None and after.report.required < now.report.required:
            taken, now = [*taken, one], after
    for one in taken[-2::-1]:
        rest = [other for other in taken if other is not one]
        if (without := _with(config, rest, needs)) is not None and without.report.fits:
            taken, now = rest, without
    return now


def _with(config: RunConfig, chosen: Sequence[Candidate], needs: Evaluate) -> Combination | None:
    """The run with these changes; None if it cannot have them."""
    settings = {key: value for one in chosen for key, value in one.settings.items()}
    try:
        return Combination(settings, tuple(one.why for one in chosen), needs(changed(config, settings)))
    except (UserError, ValueError):
        return None


def _alive(one: Candidate, report: MemoryReport) -> int:
    """Bytes at the peak that a change acts on."""
    return sum(getattr(report.fullest.parts, part) for part in one.parts)


def _lacking(report: MemoryReport) -> int:
    """Bytes of the fullest rank's peak that the card does not have."""
    assert report.gpu is not None
    return report.fullest.peak_allocated + report.fullest.outside_allocator - report.gpu.usable_bytes


_ON_HOST = {"model.experts_on": "host", "train.checkpointing": "offload", "optimizer.offload": True}


def is_setting_of_host(key: str, value: object) -> bool:
    """Whether it moves something to the host, which slows every step."""
    return _ON_HOST.get(key) == value


_UPDATED: tuple[PartName, ...] = ("optimizer_states", "master_weights")
_ACTIVATIONS: tuple[PartName, ...] = ("saved_activations", "transient_peak")


def candidates(config: RunConfig) -> Iterator[Candidate]:
    """Single changes that may save memory, the mildest first: by how much they change the training.

    1. Every update stays as it is: what is computed again, freed early, or kept on the host, which costs time.
    2. The same steps in other precision: master weights, 8-bit states, 4-bit weights of what stays frozen.
    3. The same step in smaller pieces.
    4. Another training: shorter sequences, fewer trained parameters, another optimizer.
    """
    train, model, optimizer = config.train, config.model, config.optimizer
    if config.data is not None and (train.eval_micro_batch or 0) > train.micro_batch:
        why = "evaluation in batches of the size that trains"
        yield Candidate({"train.eval_micro_batch": train.micro_batch}, why, ("transient_peak",))
    if train.checkpointing in ("none", "experts_only"):
        why = "keeps each layer's input, and computes the layer again in backward"
        yield Candidate({"train.checkpointing": "full"}, why, _ACTIVATIONS)
    if isinstance(optimizer, OptimizerConfig):
        if train.accumulate == 1 and not optimizer.fused_backward and not optimizer.offload:
            why = "frees each gradient as it comes; the largest one is alive, not all"
            yield Candidate({"optimizer.fused_backward": True}, why, ("gradients",))
        if not optimizer.offload and not optimizer.fused_backward and optimizer.master_weights != "stochastic":
            why = "states, float32 weights and updates in host memory"
            yield Candidate({"optimizer.offload": True}, why, ("gradients", *_UPDATED))
    if train.checkpointing != "offload":
        why = "as full, and the layers' inputs wait in host memory"
        yield Candidate({"train.checkpointing": "offload"}, why, _ACTIVATIONS)
    if model.experts_on != "host":
        why = "packed experts come from host memory in time; wants many tokens a step"
        yield Candidate({"model.experts_on": "host"}, why, ("frozen_weights",))
    if isinstance(optimizer, OptimizerConfig):
        if optimizer.master_weights == "fp32" and not optimizer.offload:
            why = "no master weights: updates are rounded stochastically"
            yield Candidate({"optimizer.master_weights": "stochastic"}, why, ("master_weights",))
        if (optimizer.name, optimizer.master_weights) != ("adamw8bit", "none"):
            settings = {"optimizer.name": "adamw8bit", "optimizer.master_weights": "none"}
            why = "8-bit AdamW keeps 2 bytes a trained parameter, and no master weights"
            yield Candidate(dict(settings), why, _UPDATED)
    if model.base == "nf4" and not model.double_quant:
        why = "8 bits for the scales of what stays frozen"
        yield Candidate({"model.double_quant": True}, why, ("frozen_weights",))
    if model.base not in ("nf4", "auto"):
        yield Candidate({"model.base": "nf4"}, "4 bits for what stays frozen", ("frozen_weights",))
    if train.micro_batch > 1:
        pieces = {"train.micro_batch": 1, "train.accumulate": train.accumulate * train.micro_batch}
        yield Candidate(dict(pieces), "the same step in smaller pieces", _ACTIVATIONS)
    if (half := train.sequence_length // 2) >= _SHORTEST:
        yield Candidate({"train.sequence_length": half}, "half as many tokens at once", _ACTIVATIONS)
    if config.adapt.lora is not None and (rank := config.adapt.lora.rank // 2) >= _LOWEST:
        parts: tuple[PartName, ...] = ("trainable_weights", "gradients", *_UPDATED)
        yield Candidate({"adapt.lora.rank": rank}, "half the factors", parts)
    if isinstance(optimizer, OptimizerConfig) and (optimizer.name, optimizer.master_weights) != ("sgd", "none"):
        settings = {"optimizer.name": "sgd", "optimizer.master_weights": "none"}
        yield Candidate(dict(settings), "SGD without momentum keeps no states", _UPDATED)


_SHORTEST, _LOWEST = 512, 8
"""Tokens of a sequence and rank that are still worth training."""


def changed(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """The run file with other values, by dotted key. An optimizer of another name begins with its own settings.

    Raises:
        UserError: it is then no valid run file.
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
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        said = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        raise UserError(f"{', '.join(f'{key}={value}' for key, value in settings.items())}: {said}") from None
