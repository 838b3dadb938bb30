"""Changes of a run file that save memory, mildest first (`savings`); those that suffice (`fitting`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from pydantic import ValidationError

from moetune.config.schema import OptimizerConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.report import Change, MemoryReport, PartName

Predict = Callable[[RunConfig], MemoryReport]
"""A configuration -> its predicted memory."""
Left = Callable[[MemoryReport], int]
"""A prediction -> the bytes that the run leaves free, of the GPU or of GPU and host; negative if it does not fit."""
_ON_HOST = {
    "model.embeddings_on": "host", "model.experts_on": "host", "train.checkpointing": "offload",
    "optimizer.offload": True,
}  # fmt: skip
_UPDATED: tuple[PartName, ...] = ("optimizer_states", "master_weights")
_ACTIVATIONS: tuple[PartName, ...] = ("saved_activations", "transient_peak")
_SHORTEST, _LOWEST = 512, 8
"""Shortest sequence, in tokens, and lowest LoRA rank that are suggested."""


class Saving(NamedTuple):
    """Candidate settings that may save memory: dotted run-file key -> new value.

    Attributes:
        why: how they save memory, in a few words for the user.
        parts: the parts of the peak (`Parts`) that they can reduce.
    """

    settings: dict[str, object]
    why: str
    parts: tuple[PartName, ...]


@dataclass(frozen=True)
class Remedy:
    """Settings with which a run fits.

    Attributes:
        settings: dotted run-file key -> new value.
        why: how they save memory, one explanation for each saving applied.
        report: the predicted memory of the run with them.
    """

    settings: dict[str, object]
    why: tuple[str, ...]
    report: MemoryReport

    @property
    def flags(self) -> tuple[str, ...]:
        """The settings as `key=value` strings, in the form that `--set` takes."""
        return tuple(f"{key}={value}" for key, value in self.settings.items())

    def change_of(self, before: MemoryReport) -> Change:
        """Return the `Change` that a report prints, relative to `before`, the prediction without the settings."""
        required = self.report.required
        return Change(self.flags, before.required - required, required, self.report.fits is True, "; ".join(self.why))


def fitting(
    config: RunConfig, report: MemoryReport, predict: Predict, left: Left = attrgetter("least_headroom")
) -> Iterator[Remedy]:
    """Yield each single saving with which a run surely fits its GPU and host, in the order of `savings`; if there is
    none, one combination of savings, of which all are needed.

    Yields nothing if no combination suffices, `report` has no GPU, or the memory outside torch's allocator fills it.

    Args:
        report: the prediction for `config`, which does not fit, or not surely.
        predict: returns the prediction for a changed configuration on the GPU of `report`.
        left: returns the bytes that a predicted run leaves free; the run fits if they are not negative. By default
            those that are left on the GPU if the run needs the most that it may.
    """
    if report.headroom_bytes is None or report.headroom_bytes + report.required <= report.fullest.outside_allocator:
        return  # no GPU given, or a GPU that is too small for any run
    is_single = False
    for saving in savings(config):
        if _alive(saving, report) + report.fullest.parts.transient_peak < _lacking(report, left):
            continue  # would not fit even if these parts took no memory
        if (remedy := _with(config, [saving], predict)) is not None and left(remedy.report) >= 0:
            is_single = True
            yield remedy
    if not is_single and (combined := _combined(config, report, predict, left)) is not None:
        yield combined


def _combined(config: RunConfig, report: MemoryReport, predict: Predict, left: Left) -> Remedy | None:
    """Add savings in order until the run fits, then drop those no longer needed, from the last to the first; arguments
    as for `fitting`.

    Returns None if all of them do not suffice. Savings whose parts hold at most 1 % of the missing bytes are not tried.
    """
    taken: list[Saving] = []
    tried: list[Saving] = []
    now = Remedy({}, (), report)
    while left(now.report) < 0:
        least = _lacking(now.report, left) // 100
        possible = savings(changed(config, now.settings))
        saving = next(
            (saving for saving in possible if saving not in tried and _alive(saving, now.report) > least), None
        )
        if saving is None:
            return None
        tried.append(saving)
        after = _with(config, [*taken, saving], predict)
        if after is not None and after.report.required < now.report.required:
            taken, now = [*taken, saving], after
    for saving in taken[-2::-1]:
        rest = [kept for kept in taken if kept is not saving]
        if (without := _with(config, rest, predict)) is not None and left(without.report) >= 0:
            taken, now = rest, without
    return now


def _with(config: RunConfig, chosen: Sequence[Saving], predict: Predict) -> Remedy | None:
    """Predict a run with the chosen savings applied together; None if configuration or model do not allow them, or if
    the host is known to lack room for what they move there."""
    settings = {key: value for saving in chosen for key, value in saving.settings.items()}
    try:
        report = predict(changed(config, settings))
    except (UserError, ValueError):
        return None
    if report.host_verdict not in (None, "yes"):
        return None
    return Remedy(settings, tuple(saving.why for saving in chosen), report)


def _alive(saving: Saving, report: MemoryReport) -> int:
    """Return the bytes at the peak, on the fullest rank, of the parts that a saving can reduce."""
    return sum(getattr(report.fullest.parts, part) for part in saving.parts)


def _lacking(report: MemoryReport, left: Left) -> int:
    """Return the bytes that a step, apart from loading, needs beyond the memory that there is: the run's `required`
    plus what it leaves free, `left` (negative if the run does not fit)."""
    peak = report.fullest.peak_allocated + report.fullest.outside_allocator
    return peak - report.required - left(report)


def is_setting_of_host(key: str, value: object) -> bool:
    """Return whether setting `key` to `value` moves tensors to host memory, which makes every step slower."""
    return _ON_HOST.get(key) == value


def savings(config: RunConfig) -> Iterator[Saving]:
    """Yield the savings that `config` does not use yet, ordered by how much they change the training.

    1. Equal updates in slower steps: recomputation, gradients freed early, host memory instead of GPU memory.
    2. Lower precision: stochastic rounding instead of master weights, 8-bit optimizer states, LoRA factors in 16 bits,
       4-bit frozen weights.
    3. The same step in smaller micro-batches.
    4. Different training: shorter sequences, LoRA factors that experts share, a lower LoRA rank, SGD.
    """
    train, model, optimizer = config.train, config.model, config.optimizer
    single = optimizer if isinstance(optimizer, OptimizerConfig) else None
    if config.data is not None and (train.eval_micro_batch or 0) > train.micro_batch:
        why = "evaluation in batches of the size that trains"
        yield Saving({"train.eval_micro_batch": train.micro_batch}, why, ("transient_peak",))
    if isinstance(train.keep_rows, int):
        yield Saving({"train.keep_rows": "none"}, "computes gate_up's rows again in backward", _ACTIVATIONS)
    if train.layer_by_layer is True:
        why = "one micro-batch after the other: those that wait hold nothing, and each copies what is on the host"
        yield Saving({"train.layer_by_layer": False}, why, _ACTIVATIONS)
    on_host = train.checkpointing == "offload" or getattr(train.checkpointing, "host", "none") != "none"
    if not on_host and train.checkpointing not in ("auto", "full"):
        why = "keeps each layer's input, and computes the layer again in backward"
        yield Saving({"train.checkpointing": "full"}, why, _ACTIVATIONS)
    if single and not single.offload and not single.fused_backward:
        if train.accumulate == 1:
            why = "frees each gradient during backward; only the largest is alive, not all"
            if train.max_grad_norm:
                why += ". Clipping by norm takes a second pass; train.max_grad_norm: 0 needs none"
            yield Saving({"optimizer.fused_backward": True}, why, ("gradients",))
        if single.master_weights != "stochastic":
            why = "states, float32 weights and updates in host memory"
            yield Saving({"optimizer.offload": True}, why, ("gradients", *_UPDATED))
    if train.checkpointing != "offload":
        why = "like full, but keeps the layers' inputs in host memory"
        yield Saving({"train.checkpointing": "offload"}, why, _ACTIVATIONS)
    if model.embeddings_on != "host":
        why = "frozen embedding tables in host memory, where rows are looked up"
        yield Saving({"model.embeddings_on": "host"}, why, ("frozen_weights",))
    if model.experts_on != "host":
        why = "quantized experts are kept in host memory; needs many tokens a step"
        yield Saving({"model.experts_on": "host"}, why, ("frozen_weights",))
    if single and single.master_weights == "fp32" and not single.offload:
        why = "no master weights: updates are rounded stochastically"
        yield Saving({"optimizer.master_weights": "stochastic"}, why, ("master_weights",))
    if single and (single.name, single.master_weights) != ("adamw8bit", "none"):
        why = "8-bit AdamW keeps 2 bytes a trained parameter, and no master weights"
        yield Saving({"optimizer.name": "adamw8bit", "optimizer.master_weights": "none"}, why, _UPDATED)
    lora = config.adapt.lora
    if lora is not None and lora.dtype == "fp32" and config.parallel.ranks == 1:
        why = "LoRA factors and their gradients in 16 bits; updates are rounded stochastically"
        yield Saving({"adapt.lora.dtype": "bf16"}, why, ("trainable_weights", "gradients"))
    if "nf4" in model.storages and not model.double_quant:
        yield Saving({"model.double_quant": True}, "8 bits for the scales of frozen weights", ("frozen_weights",))
    if model.storages - {"nf4", "auto"}:
        yield Saving({"model.base": "nf4"}, "4 bits for frozen weights", ("frozen_weights",))
    if train.micro_batch > 1:
        smaller = {"train.micro_batch": 1, "train.accumulate": train.accumulate * train.micro_batch}
        yield Saving(dict(smaller), "the same step in smaller micro-batches", _ACTIVATIONS)
    if (half := train.sequence_length // 2) >= _SHORTEST:
        yield Saving({"train.sequence_length": half}, "half as many tokens at once", _ACTIVATIONS)
    parts: tuple[PartName, ...] = ("trainable_weights", "gradients", *_UPDATED)
    if lora is not None and "experts" in lora.targets and lora.share == "none" and config.parallel.ep == 1:
        why = "all experts of a layer share LoRA's A of gate_up and B of down"
        yield Saving({"adapt.lora.share": "outer"}, why, parts)
    rank = None if lora is None else lora.rank
    if isinstance(rank, int) and rank // 2 >= _LOWEST:
        yield Saving({"adapt.lora.rank": rank // 2}, "LoRA factors of half the size", parts)
    if single and (single.name, single.master_weights) != ("sgd", "none"):
        why = "SGD without momentum keeps no states"
        yield Saving({"optimizer.name": "sgd", "optimizer.master_weights": "none"}, why, _UPDATED)


def changed(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """Return a copy of a configuration with new values: dotted key -> value, such as `{"train.micro_batch": 1}`.

    If `optimizer.name` changes, `betas`, `eps` and `momentum` are removed, so that the new optimizer's defaults apply.
    Raises `UserError` if the result is not valid.
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
