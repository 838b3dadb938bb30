"""The quantize command's work: a checkpoint is packed once, to be read in a fraction of the time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from moetune.adapt.build import load_pretrained
from moetune.adapt.pack import make_expert_context
from moetune.adapt.weights import quantized_base
from moetune.adapt.weights.base import checkpoint_of, folder_of
from moetune.adapt.weights.quantized_base import is_quantized_base
from moetune.adapt.weights.quantizer import MoetuneConfig
from moetune.config.schema import ModelConfig
from moetune.errors import UserError
from moetune.files import WriterLock, expanded, refused
from moetune.models.hub.fingerprint import taking_fingerprint
from moetune.models.hub.tensor_files import weight_files
from moetune.models.selection import NOTHING
from moetune.parallel.ranks import SINGLE_RANK
from moetune.run.dtypes import this_device
from moetune.run.resolve import ResolvedModel, resolve_model


def quantize(
    model: ResolvedModel | Path | str, out: Path | str, on_read: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Packs a checkpoint into the folder `out` as `model.config` says, layer by layer; layers that are there are not
    read again.

    Returns:
        `files` and `bytes` that were written.

    Raises:
        UserError: its weights cannot be read, or the folder cannot be written.
    """
    if not isinstance(model, ResolvedModel):
        model = resolve_model(ModelConfig(path=str(model), dtype="bf16", attention="eager"))
    path = model.config.path
    if folder_of(model.source) is None:
        raise UserError(f"model {path!r}: its weights are not on this machine; download it first, or give a folder")
    if is_quantized_base(model.source.folder):
        raise UserError(f"model {path!r} is packed already")
    folder = checkpoint_of(model.source)
    model = replace(model, source=replace(model.source, folder=str(folder)))
    out = expanded(out)
    with closing(WriterLock(out)) as writer:
        try:
            out.mkdir(parents=True, exist_ok=True)
            writer.take(f"--out {str(out)!r}", create=True)
            return _quantize(model, folder, out, on_read)
        except (OSError, SafetensorError) as error:
            if (reason := refused(error)) is None:
                raise
            raise UserError(f"--out {str(out)!r} cannot be written: {reason}") from error


def _quantize(model: ResolvedModel, folder: Path, out: Path, on_read: Callable[[float], None] | None) -> dict[str, Any]:
    quantized_base.begin(out, model, folder, weight_files(folder))
    device = torch.device(this_device())
    paths = [layer.experts for layer in model.structure.moe_layers]
    packing = MoetuneConfig(
        model.config.base,
        model.config.double_quant,
        on_read=on_read,
        on_bank=lambda experts, bank: quantized_base.write_bank(out, experts, bank),
        done=[experts for experts in paths if (out / quantized_base.layer_file(experts)).is_file()],
        structure=model.structure,
        context=make_expert_context(model.config, NOTHING, SINGLE_RANK, device, split_gate_up=model.gate_up_apart),
    )
    with taking_fingerprint(folder) as taken:
        loaded = load_pretrained(model, packing, device)
        quantized_base.write_rest(out, loaded, paths, folder, model.plain)
        fingerprint = taken()
    return quantized_base.finish(out, fingerprint, paths)
