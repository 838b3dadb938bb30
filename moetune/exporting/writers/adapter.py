"""`write_peft` and `write_for_server`: export LoRA as an adapter; what an adapter's files hold: adapters/write.py.

The layouts are those of `moetune.adapters.write`: `PeftModel.from_pretrained` loads the one for PEFT, and
`vllm serve BASE --enable-lora --lora-modules NAME=DIR` or SGLang the others.
"""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model, set_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapters.base import AdapterBase, base_of
from moetune.adapters.factors import DOWN, GATE_UP, Adapter, Factors, join_experts
from moetune.adapters.files import PREFIX, write_adapter
from moetune.adapters.write import laid_out, saved_module
from moetune.compat import llama4
from moetune.errors import UserError, one_line
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base
from moetune.exporting.folder import Written
from moetune.formats.checkpoint import open_checkpoint
from moetune.models.hub.key_mapping import key_mappings
from moetune.run.names import linear_factors


def write_peft(run: FinishedRun, out: Path) -> Written:
    """Write the trained tensors of a run as a PEFT adapter: `adapter_config.json` and `adapter_model.safetensors`.

    Loaded by PEFT onto the unquantized model in the run's `model.path`, or the checkpoint that was quantized to it, it
    computes what the trained model computes.

    Raises:
        UserError: the run has no LoRA; it trains something that PEFT cannot hold, such as whole experts; its base has
            changed; or PEFT would not load every tensor of the adapter on this model.
    """
    if run.config.adapt.lora is None:
        raise UserError(f"{run} has no adapt.lora, so there is no adapter; use --format delta or merged")
    source, base = run.adapted.run.model.source, _base_of(run)
    if run.base is not None:
        quantized = source.quantized_base
        if quantized is not None:
            confirmed_base(run, Path(str(source.folder)), quantized.fingerprint)
        if quantized is None or quantized.source.is_dir():  # LoRA factors alone need no source
            confirmed_base(run, base_folder(run))
    trained = {name: stored.rows() for name, stored in run.trained.items()}
    adapter = _trained_adapter(run, trained, _saved_tensors(run, _saved_modules(run, base), trained))
    original = source.folder if source.quantized_base is None else str(source.quantized_base.source)
    return _write(adapter, base, "peft", out, original or source.name)


def write_for_server(program: str, run: FinishedRun, out: Path) -> Written:
    """Write the LoRA factors of a run as an adapter for vLLM or SGLang, as `program` says, into the folder `out`:
    tensors named as in the base checkpoint, one rank, one scale.

    Raises:
        UserError: the run has no LoRA, or also trains parameters in full precision; the base is missing or has changed;
            or the program has no name for a parameter with LoRA in the form in which the base checkpoint stores it.
    """
    selection = run.adapted.selection
    if run.config.adapt.lora is None:
        raise UserError(f"{run} has no adapt.lora, so there is no adapter; use export --format merged")
    if selection.full or selection.experts:
        what = min(selection.full) if selection.full else "whole experts"
        raise UserError(
            f"{run} trains {what} beside LoRA, and adapters of {program} hold factors only; use export --format merged"
        )
    folder = base_folder(run)
    if run.base is not None:
        confirmed_base(run, folder)
    adapter = _trained_adapter(run, {name: stored.rows().float() for name, stored in run.trained.items()}, {})
    return _write(adapter, _base_of(run), program, out, str(folder))


def _base_of(run: FinishedRun) -> AdapterBase:
    model = run.adapted.run.model
    return base_of(model.source, model.plain, model.structure, model.source.name)


def _write(adapter: Adapter, base: AdapterBase, program: str, out: Path, name: str) -> Written:
    """Write an adapter in a program's layout to an export's folder; `name` is what its settings call the base."""
    laid = laid_out(adapter, base, program)
    laid.settings["base_model_name_or_path"] = name
    if program == "peft":
        refuse_lost(copy.deepcopy(base.plain), laid.tensors, laid.settings)
    return Written(len(laid.tensors), write_adapter(out, laid.tensors, laid.settings, laid.record()), laid.notes)


def _trained_adapter(run: FinishedRun, trained: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> Adapter:
    """Return the LoRA factors of a run, with zeros for experts without LoRA.

    If gate and up have separate factors of rank r, they are joined to factors of rank 2r (`join_experts`).

    Args:
        trained: the trained tensors, by their names in a training checkpoint.
        saved: the parameters that the adapter shall hold whole, by name.
    """
    adapted, lora = run.adapted, run.config.adapt.lora
    assert lora is not None
    linears, experts = {}, {}
    for path in adapted.selection.lora_linears:
        A, B = (trained[name] for name in linear_factors(path).values())
        linears[path] = Factors(A, B, lora.scale(adapted.selection.ranks[path]))
    for layer, own in adapted.expert_lora():
        factors = experts[layer.experts] = dict[str, Factors]()
        for projection in (GATE_UP, DOWN):
            A, B = (
                torch.stack(
                    [trained[f"{layer.experts}.lora.{own.stored_name(factor, expert)}"] for expert in own.slots]
                )
                for factor in (f"{projection}_A", f"{projection}_B")
            )
            A, B = join_experts(A, B, own.slots, layer.shape.num_experts, own.rows_of_parts[projection])
            factors[projection] = Factors(A, B, own.scale)
    return Adapter(linears, experts, saved)


def _saved_modules(run: FinishedRun, base: AdapterBase) -> tuple[str, ...]:
    """Return the paths of the modules that PEFT must save whole: those with parameters that train in full precision.

    Of a router, always the whole module is saved, even if only a submodule's parameter trains.

    Raises:
        UserError: whole experts train; a router bias that training updates is in none of these modules; or one of them
            contains LoRA factors, which PEFT would not save with it.
    """
    adapted, full = run.adapted, run.adapted.selection.full
    if adapted.selection.experts:
        layers = ", ".join(map(str, adapted.selection.experts))
        raise UserError(
            f"experts of layer {layers} train whole (adapt.experts), and a PEFT adapter holds low-rank factors of "
            "experts only; use --format delta or merged"
        )
    tied = (name for name, first in adapted.structure.tied.items() if first in full)
    paths = {saved_module(name, base) for name in (*full, *tied)}
    apart = [name for name in adapted.run.router_biases.values() if name.rpartition(".")[0] not in paths]
    if apart:
        raise UserError(
            f"{apart[0]} was updated (train.router_bias_rate), and is in no module that PEFT could save whole; use "
            "--format delta or merged"
        )
    with_factors = sorted({*adapted.selection.lora_linears, *base.layers})
    for path in sorted(paths):
        if inside := [name for name in with_factors if f"{name}.".startswith(f"{path}.")]:
            raise UserError(
                f"parameters of {path!r} train in full precision, and PEFT saves modules whole: that one holds "
                f"{inside[0]}, which it cannot save; use --format delta or merged"
            )
    return tuple(sorted(paths))


def _saved_tensors(run: FinishedRun, modules: tuple[str, ...], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors of the modules that PEFT saves whole, by name in the plain model.

    Those that did not train have the base's values; raises `UserError` if the base lacks one. `modules` are from
    `saved_modules`, `trained` the trained tensors by name.
    """
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


def refuse_lost(plain: PreTrainedModel, tensors: Mapping[str, Tensor], settings: dict[str, Any]) -> None:
    """Raise `UserError` if PEFT fails to load the adapter onto the model, or loads it incompletely (PEFT only warns).

    Incompletely means that a tensor of the adapter has no place in the model, or a LoRA factor or saved module of the
    model gets no tensor: PEFT renames the tensors of some model types. `tensors` have their names without PEFT's
    prefix; `settings` are those of `adapter_config.json`. `plain`, a meta model, is modified.
    """
    empty = {f"{PREFIX}{name}": tensor.to("meta") for name, tensor in tensors.items()}
    experts: list[Any] = [module for module in plain.modules() if isinstance(module, llama4.Experts)]
    for module in experts:
        module.is_transposed = False  # PEFT does not find this mark on the model's own class
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
            "use export --format merged"
        )
