"""`moetune quantize`: convert a checkpoint to a quantized base on disk, layer by layer."""

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from moetune.adapt.weights import quantized_base
from moetune.adapt.weights.published import CheckpointReader
from moetune.adapt.weights.target import LoadTarget
from moetune.config.schema import ModelConfig
from moetune.errors import UserError
from moetune.experts.context import ExpertContext
from moetune.files import WriterLock, expanded, refused
from moetune.models.hub.fingerprint import taking_fingerprint
from moetune.models.hub.tensor_files import weight_files
from moetune.models.selection import NOTHING
from moetune.run.dtypes import this_device
from moetune.run.resolve import ResolvedModel, resolve_model


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
        out: folder to write to; created if it does not exist. It must be empty, or left by an interrupted call.
        on_read: called repeatedly with the fraction of the weights that has been read (0 to 1).
        overwrite: first remove the quantized base, finished or not, that `out` holds.

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
    folder = model.source.weights()
    out = expanded(out)
    with closing(WriterLock(out)) as writer:
        try:
            out.mkdir(parents=True, exist_ok=True)
            writer.take(f"--out {str(out)!r}", create=True)
            return _quantize(model, folder, out, on_read, overwrite=overwrite)
        except (OSError, SafetensorError) as error:
            if (reason := refused(error)) is None:
                raise
            raise UserError(f"--out {str(out)!r} cannot be written: {reason}") from error


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


def _quantize(
    model: ResolvedModel, folder: Path, out: Path, on_read: Callable[[float], None] | None, *, overwrite: bool
) -> dict[str, Any]:
    target = target_of(model, torch.device(this_device()), on_read)
    loaded = target.model
    reader = CheckpointReader(folder, model.plain, model.source.name, target)  # refuses what does not fit the model
    if overwrite:
        quantized_base.remove(out)
    quantized_base.begin(out, model, folder, weight_files(folder))
    with taking_fingerprint(folder) as taken:
        for path in target.layers:
            if not (out / quantized_base.layer_file(path)).is_file():
                reader.read_experts(path)
                quantized_base.write_bank(out, path, target.bank(path))
            target.release(path)
        reader.read_rest(loaded)
        quantized_base.write_rest(out, loaded, folder, model.plain)
        fingerprint = taken()
    return quantized_base.finish(out, fingerprint, target.layers)
