"""`write_peft`: export LoRA and fully trained modules as an adapter that `PeftModel.from_pretrained` loads."""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model, set_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapt.build import Adapted
from moetune.adapters.base import base_of
from moetune.adapters.files import PREFIX, write_adapter
from moetune.adapters.write import LaidOut, laid_out
from moetune.errors import UserError, one_line
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base
from moetune.exporting.folder import Written
from moetune.exporting.formats.trained_adapter import trained_adapter
from moetune.formats.checkpoint import open_checkpoint
from moetune.models.hub.key_mapping import key_mappings

Tensors = Mapping[str, Tensor]


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
    _refuse_changed_base(run)
    saved = saved_modules(run.adapted)
    trained = {name: stored.rows() for name, stored in run.trained.items()}
    model = run.adapted.run.model
    source = model.source
    base = base_of(source, model.plain, model.structure, source.name)
    adapter = trained_adapter(run.adapted, run.config.adapt.lora, trained, _saved_tensors(run, saved, trained))
    laid = laid_out(adapter, base, "peft")
    original = source.folder if source.quantized_base is None else str(source.quantized_base.source)
    laid.settings["base_model_name_or_path"] = original or source.name
    refuse_lost(copy.deepcopy(model.plain), laid.tensors, laid.settings)
    return written(out, laid)


def written(folder: Path, laid: LaidOut) -> Written:
    """Write an adapter in a program's layout to an export's folder; return its tensors, their bytes and the notes."""
    return Written(len(laid.tensors), write_adapter(folder, laid.tensors, laid.settings, laid.record()), laid.notes)


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

    Of a router, always the whole module is saved, even if only a submodule's parameter trains.

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


def _saved_tensors(run: FinishedRun, modules: tuple[str, ...], trained: Tensors) -> dict[str, Tensor]:
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


def refuse_lost(plain: PreTrainedModel, tensors: Tensors, settings: dict[str, Any]) -> None:
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
