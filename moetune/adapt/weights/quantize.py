"""`moetune quantize`: convert a checkpoint to a quantized base on disk, layer by layer."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moetune.adapt.weights import quantized_base
from moetune.adapt.weights.published import CheckpointReader
from moetune.adapt.weights.quantized_base import KIND
from moetune.adapt.weights.target import LoadTarget
from moetune.atomic import new_folder, refuse_unfit
from moetune.config.schema import ModelConfig
from moetune.errors import UserError
from moetune.experts.context import ExpertContext
from moetune.files import expanded
from moetune.models.hub.fingerprint import taking_fingerprint
from moetune.models.selection import NOTHING
from moetune.run.dtypes import this_device
from moetune.run.resolve import ResolvedModel, resolve_model
from moetune.tensor_files import weight_files


def quantize(
    model: ResolvedModel | Path | str,
    out: Path | str,
    on_read: Callable[[float], None] | None = None,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Quantize a checkpoint into a folder that later runs load in a fraction of the time.

    An interrupted call can be repeated: layers whose file exists are not quantized again.

    Args:
        model: a resolved model, whose configuration sets the precision; or the name or folder of a model, quantized
            with the default settings.
        out: folder to write; it appears when it is complete, and must be new or empty.
        on_read: called repeatedly with the fraction of the weights that has been read (0 to 1).
        overwrite: replace the quantized base that `out` holds, and what an interrupted call for another has begun.

    Returns:
        `files` and `bytes`: number and total size of the weight files.

    Raises:
        UserError: the model is not found, not on this machine, or is a quantized base itself; its weights cannot be
            read; or the folder cannot be written or holds something else.
    """
    if not isinstance(model, ResolvedModel):
        model = resolve_model(ModelConfig.named(str(model), dtype="bf16", attention="eager"))
    path = model.config.path
    if model.source.local_folder() is None:
        raise UserError(f"model {path!r}: its weights are not on this machine; download it first, or give a folder")
    if model.source.quantized_base is not None:
        raise UserError(f"model {path!r} is quantized already")
    out, folder = expanded(out), model.source.weights()
    refuse_unfit(out, overwrite, kind=KIND)
    target = target_of(model, torch.device(this_device()), on_read)
    # refuses what does not fit the model
    reader = CheckpointReader(folder, model.plain, model.source.name, target, None, model.source.quantization.base)
    plan = quantized_base.plan(model, folder, weight_files(folder))
    with new_folder(out, overwrite, kind=KIND, task=plan) as new, taking_fingerprint(folder) as taken:
        quantized_base.begin(new, folder, target.layers)
        for path in target.layers:
            if not (new / quantized_base.layer_file(path)).is_file():
                reader.read_experts(path)
                quantized_base.write_bank(new, path, target.bank(path))
            target.release(path)
        reader.read_rest(target.model)
        quantized_base.write_rest(new, target.model, folder, model.plain)
        return quantized_base.finish(new, plan, taken(), target.layers)


def target_of(
    model: ResolvedModel,
    device: torch.device,
    on_read: Callable[[float], None] | None = None,
    kind: type[LoadTarget] = LoadTarget,
) -> LoadTarget:
    """Return a new model on the meta device, as a target of type `kind`, into which a checkpoint is quantized."""
    linears, context = model.linears_to_quantize(NOTHING), ExpertContext(split_gate_up=model.gate_up_apart)
    loaded = copy.deepcopy(model.plain)
    return kind(loaded, model.structure, NOTHING, model.config, linears, device, context=context, on_read=on_read)
