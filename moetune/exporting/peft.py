"""`write_peft`: export LoRA and fully trained modules as an adapter that `PeftModel.from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapt.build import Adapted
from moetune.adapt.start_from.peft_layout import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    expert_keys,
    join_experts,
    lora_layers,
    lora_of,
    lora_stacks,
    plain_number,
    rows_of_parts,
)
from moetune.config.schema import LoraConfig
from moetune.errors import UserError, one_line
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base
from moetune.exporting.folder import Written
from moetune.models.hub.dequantize import open_checkpoint
from moetune.models.hub.key_mapping import key_mappings
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors

_TAKEN_FOR_EXPERTS = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Names of linear layers that PEFT, on a model with experts, mistakes for the experts' projections of transformers 4.
"""
Tensors = Mapping[str, Tensor]


def write_peft(run: FinishedRun, out: Path) -> Written:
    """Write the trained tensors of a run as a PEFT adapter: `adapter_config.json` and `adapter_model.safetensors`.

    Loaded by PEFT onto the unquantized model in the run's `model.path`, it computes what the trained model computes.

    Raises:
        UserError: the run has no LoRA; it trains something that PEFT cannot hold, such as whole experts; its base has
            changed; or PEFT would not load every tensor of the adapter on this model.
    """
    if run.config.adapt.lora is None:
        raise UserError(f"{run} has no adapt.lora, so there is no adapter; use --format delta or merged")
    _refuse_changed_base(run)
    saved = saved_modules(run.adapted)
    trained = {name: stored.rows() for name, stored in run.trained.items()}
    tensors = _factors_of(run.adapted, trained) | _saved_tensors(run, saved, trained)
    source = run.adapted.run.model.source
    settings = _settings(run.adapted, run.config.adapt.lora, saved)
    settings["base_model_name_or_path"] = source.folder or source.name
    _refuse_lost(copy.deepcopy(run.adapted.run.model.plain), tensors, settings)
    return write_adapter(out, tensors, settings)


def write_adapter(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> Written:
    """Write the weights and the configuration of a PEFT adapter; raise `UserError` if they cannot be written.

    Args:
        tensors: the adapter's tensors by name, without PEFT's prefix `base_model.model.`.
        settings: the content of `adapter_config.json`.
    """
    named = {f"{PREFIX}{name}": tensor.contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{WEIGHTS_FILE} cannot be written: {one_line(error)}") from error
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return Written(len(named), sum(tensor.nbytes for tensor in named.values()))


def joined_factors(adapted: Adapted, layer: MoeLayer, projection: str, trained: Tensors) -> tuple[Tensor, Tensor]:
    """Return the LoRA factors of all experts of a layer as PEFT stacks them.

    Args:
        projection: `gate_up` or `down`.
        trained: the trained tensors, by their names in a training checkpoint.

    Returns:
        lora_A [E·R, in] and lora_B [out, R·E], zero for experts without factors. R is the rank of LoRA; twice that for
        `gate_up` if gate and up have an A each.
    """
    lora = lora_of(adapted, layer)
    names = (f"{layer.experts}.lora.{projection}_{factor}" for factor in "AB")
    A, B = (torch.stack([trained[f"{name}.{expert}"] for expert in lora.slots]) for name in names)
    lora_A, lora_B = join_experts(A, B, lora.slots, layer.shape.num_experts, rows_of_parts(lora, projection))
    return lora_A, lora_B


def _refuse_changed_base(run: FinishedRun) -> None:
    """Raise `UserError` if the base has changed since the run.

    Of a quantized base the fingerprint in its manifest is compared, and the source checkpoint if it is still on disk:
    an adapter of LoRA factors alone needs no source.
    """
    if run.base is None:
        return
    source = run.adapted.run.model.source
    if (manifest := source.quantized_base) is not None:
        confirmed_base(run, Path(str(source.folder)), manifest.fingerprint)
        if not manifest.source.is_dir():
            return
    confirmed_base(run, base_folder(run))


def saved_modules(adapted: Adapted) -> tuple[str, ...]:
    """Return the paths of the modules that PEFT must save whole: those with parameters that train in full precision.

    A router counts as one module, whichever of its parameters train.

    Raises:
        UserError: whole experts train; a router bias that training updates is in none of these modules; or one of them
            contains LoRA factors, which PEFT would not save with it.
    """
    if adapted.selection.experts:
        layers = ", ".join(map(str, adapted.selection.experts))
        raise UserError(
            f"experts of layer {layers} train whole (adapt.experts), and a PEFT adapter holds low-rank factors of "
            "experts only; use --format delta or merged"
        )
    full = adapted.selection.full
    routers = [layer.router for layer in adapted.structure.moe_layers]
    paths = set()
    for name in {*full, *(name for name, first in adapted.structure.tied.items() if first in full)}:
        router = next((path for path in routers if name.startswith(f"{path}.")), None)
        paths.add(router or name.rpartition(".")[0])
    apart = [name for name in adapted.run.router_biases.values() if name.rpartition(".")[0] not in paths]
    if apart:
        raise UserError(
            f"{apart[0]} was updated (train.router_bias_rate), and is in no module that PEFT could save whole; use "
            "--format delta or merged"
        )
    with_factors = {*adapted.selection.lora_linears, *(layer.experts for layer in adapted.structure.moe_layers)}
    for path in sorted(paths):
        inside = sorted(other for other in with_factors if f"{other}.".startswith(f"{path}."))
        if inside:
            raise UserError(
                f"parameters of {path!r} train in full precision, and PEFT saves modules whole: that one holds "
                f"{inside[0]}, which it cannot save; use --format delta or merged"
            )
    return tuple(sorted(paths))


def _settings(adapted: Adapted, lora: LoraConfig, saved: tuple[str, ...]) -> dict[str, Any]:
    """Return `adapter_config.json`. Each target is a full module path, so that PEFT matches no other layer."""
    linears = adapted.selection.lora_linears
    has_experts = bool(adapted.structure.moe_layers)
    as_parameters = [path for path in linears if has_experts and path.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]
    parameters = [f"{path}.weight" for path in as_parameters]
    sizes: dict[str, tuple[int, float]] = {}  # name of a layer or parameter -> rank and alpha
    for path in linears:
        rank = adapted.selection.ranks[path]
        sizes[f"{path}.weight" if path in as_parameters else path] = rank, lora.plain_alpha(rank)
    for layer in lora_layers(adapted):
        rank = adapted.selection.ranks[layer.experts]
        for stack, parts in zip(lora_stacks(layer), (len(lora_of(adapted, layer).gate_up_rows), 1), strict=True):
            parameters.append(f"{layer.experts}.{stack}")
            sizes[f"{layer.experts}.{stack}"] = parts * rank, parts * lora.plain_alpha(rank)
    usual, patterns = _patterns(sizes)
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=usual[0],
        lora_alpha=plain_number(usual[1]),
        rank_pattern={pattern: rank for pattern, (rank, _) in patterns.items()},
        alpha_pattern={pattern: plain_number(alpha) for pattern, (_, alpha) in patterns.items() if alpha != usual[1]},
        target_modules=[],  # None would mean PEFT's defaults for the model type; the real ones are set below
        target_parameters=parameters or None,
        modules_to_save=list(saved) or None,
        ensure_weight_tying=bool(adapted.selection.full & set(adapted.structure.tied.values())),
        inference_mode=True,
    ).to_dict()
    return settings | {"target_modules": [path for path in linears if path not in as_parameters]}


def _patterns(sizes: Mapping[str, tuple[int, float]]) -> tuple[tuple[int, float], dict[str, tuple[int, float]]]:
    """Return the rank and alpha that most names have, and regular expression -> rank and alpha for the other names.

    An expression is the last two parts of the name where all names with this ending have the same rank and alpha.

    Args:
        sizes: name -> rank and alpha.
    """
    often = Counter(sizes.values())
    usual = max(often, key=lambda size: (often[size], -size[0]))
    endings = defaultdict(set)
    for name, size in sizes.items():
        endings[_ending(name)].add(size)
    return usual, {
        re.escape(_ending(name) if endings[_ending(name)] == {size} else name): size
        for name, size in sizes.items()
        if size != usual
    }


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _factors_of(adapted: Adapted, trained: Tensors) -> dict[str, Tensor]:
    """Return the LoRA factors of linear layers and experts, by their names in a PEFT adapter."""
    tensors: dict[str, Tensor] = {}
    for path in adapted.selection.lora_linears:
        tensors |= {f"{path}.lora_{factor}.weight": trained[name] for factor, name in linear_factors(path).items()}
    for layer in lora_layers(adapted):
        for projection, path in expert_keys(layer).items():
            names = (f"{path}.lora_{factor}.weight" for factor in "AB")
            tensors |= zip(names, joined_factors(adapted, layer, projection, trained), strict=True)
    return tensors


def _saved_tensors(run: FinishedRun, modules: tuple[str, ...], trained: Tensors) -> dict[str, Tensor]:
    """Return all tensors of the modules that PEFT saves whole, by name; frozen ones have the base's values. Raises
    `UserError` if the base lacks one of these."""
    plain, tied = run.adapted.run.model.plain, run.adapted.structure.tied
    shapes = {
        f"{path}.{key}": tensor.shape
        for path in modules
        for key, tensor in plain.get_submodule(path).state_dict().items()
    }
    values = dict(trained)
    frozen = {tied.get(name, name) for name in shapes} - values.keys()
    if frozen:
        stored = open_checkpoint(base_folder(run))
        homes = key_mappings(plain, stored, split=True)
        for name in sorted(frozen):
            if name not in homes:
                raise UserError(
                    f"PEFT saves modules whole, and the base checkpoint has no {name}, which is frozen beside what "
                    "trained; use --format delta"
                )
            values[name] = homes[name].to_model(lambda key: stored[key].rows())
    return {name: values[tied.get(name, name)].reshape(shape) for name, shape in shapes.items()}


def _refuse_lost(plain: PreTrainedModel, tensors: Tensors, settings: dict[str, Any]) -> None:
    """Raise `UserError` if PEFT fails to load the adapter onto the model, or loads it incompletely (PEFT only warns).

    Incompletely means that a tensor of the adapter has no place in the model, or a LoRA factor or saved module of the
    model gets no tensor: PEFT renames the tensors of some model types. `tensors` have their names without PEFT's
    prefix; `settings` are those of `adapter_config.json`. `plain`, a meta model, is modified.
    """
    empty = {f"{PREFIX}{name}": tensor.to("meta") for name, tensor in tensors.items()}
    kind = plain.config.model_type
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(plain, PeftLoraConfig(**settings), low_cpu_mem_usage=True)
            outcome: Any = set_peft_model_state_dict(model, empty, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT raises errors of many types
        raise UserError(f"PEFT cannot load this adapter on {kind!r}: {one_line(error)}; use --format merged") from error
    missing = [name for name in outcome.missing_keys if ".lora_" in name or ".modules_to_save." in name]
    if lost := sorted([*missing, *outcome.unexpected_keys]):
        raise UserError(
            f"PEFT would not load this adapter on {kind!r}: it finds no place for {lost[0].removeprefix(PREFIX)}; "
            "use --format merged"
        )
