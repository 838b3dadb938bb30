"""`write_rounded`: a merged checkpoint in FP8, NVFP4, MXFP4 or INT4, and how much of the training survives.

A base that is published in the format is copied byte for byte, and the tensors that trained are rounded again, under
the same names. Of any other base, experts and linear layers of the decoder are rounded, and all else is in 16 bits.

Shapes: a matrix is [out, in].
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moetune.config.schema import Storage
from moetune.errors import UserError
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base, manifest_entries
from moetune.exporting.folder import Written, write_export_manifest
from moetune.exporting.writers.merged import complete_config, copy_rows, create_files, write_config
from moetune.exporting.writers.updates import new_rows, placed, updates
from moetune.formats.base import Format, Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.table import FORMATS
from moetune.models.hub.fingerprint import take_fingerprint
from moetune.models.hub.key_mapping import key_mappings
from moetune.models.hub.snapshot import copy_small_file, small_files
from moetune.models.selection import NOTHING
from moetune.run.linears import linears_to_quantize
from moetune.run.names import stacks
from moetune.run.resolved import ResolvedModel
from moetune.tensor_files import INDEX_FILE, SINGLE_FILE, Stored

Into = Literal["fp8", "mxfp8", "nvfp4", "mxfp4", "int4"]
"""A quantized format to export in: `--into`."""
_INT4: Storage = "int4-g32"
"""The format that `int4` stands for, unless the base is published in another kind of it."""


@dataclass(frozen=True)
class Survival:
    """What rounding leaves of Δ, the change that training made to the matrices W of one layer.

    With Q(W) the base in the format and Q(W + Δ) what was exported, `kept` is ⟨Q(W + Δ) − Q(W), Δ⟩ / ⟨Δ, Δ⟩: 1 if the
    change survives on the whole, 0 if it is lost. `error` is ‖Q(W + Δ) − Q(W) − Δ‖ / ‖Δ‖. A base that is published in
    the format is its own Q(W).

    Attributes:
        layer: number of the decoder layer; None for all layers together, or for a matrix outside of them.
    """

    layer: int | None
    kept: float
    error: float


def write_rounded(run: FinishedRun, out: Path, into: Into) -> tuple[Written, tuple[Survival, ...]]:
    """Write the merged checkpoint of a run, rounded to a quantized format, to the folder `out`.

    Also return what survives of the change: of each layer in ascending order, of matrices in no layer, and last of all
    together; empty if no matrix that trained is quantized.

    Raises:
        UserError: the run began with random weights; the base is missing, has changed since the run, or has no tensor
            for a trained parameter; or checkpoints of the model type have no layout in this format.
    """
    folder, model = base_folder(run), run.adapted.run.model
    published = model.source.quantization.base
    is_kind = isinstance(published, str) and published.split("-")[0] == into
    format = FORMATS[published if isinstance(published, str) and is_kind else _INT4 if into == "int4" else into]
    base = _open_exactly(folder)
    targets = placed(model, updates(run), base)
    own = [tensor for tensor in base.values() if isinstance(tensor, format.layouts)]
    is_published = bool(own) and all(isinstance(tensor, Quantized) and tensor.is_in(format) for tensor in own)
    chosen = set[str]() if is_published else _to_round(model, base, format)
    for file in small_files(folder):
        copy_small_file(file, folder, out)
    if is_published:
        if not (folder / SINGLE_FILE).is_file():
            copy_small_file(folder / INDEX_FILE, folder, out)
        fingerprint = take_fingerprint(folder, copy_to=out)
    else:
        fingerprint = take_fingerprint(folder)
        _write_base(base, chosen, folder, out, format)
    of_base = confirmed_base(run, folder, fingerprint)
    places = _open_exactly(out)
    sums: dict[int | None, Tensor] = {}
    changed: set[str] = set()
    for update, mapping in targets:
        number = re.search(r"\.(\d+)\.", update.parameter)
        layer = None if number is None else int(number[1])
        for key, start, rows in new_rows(update, mapping, base, into=places):
            changed.add(key)
            if not isinstance(place := places[key], Quantized):
                place.write(rows, start)
                continue
            stop = start + len(rows)
            before = place.rows(start, stop)
            _write(place, rows.float(), start, keep=is_published)
            rounded = place.rows(start, stop) - before
            of_matrix = _sums(rows.float() - base[key].rows(start, stop).float(), rounded)
            sums[layer] = sums[layer] + of_matrix if layer in sums else of_matrix
    write_export_manifest(out, manifest_entries(run) | {"format": "merged", "into": into, "base": of_base.to_json()})
    written = (places[key] for key in changed)
    parts = (part for one in written for part in (one.parts.values() if isinstance(one, Quantized) else (one,)))
    size = sum(part.nbytes for part in parts)
    ordered = sorted(sums, key=lambda layer: (layer is None, layer or 0))
    survivals = [_survival(layer, sums[layer]) for layer in ordered]
    if sums:
        survivals.append(_survival(None, torch.stack([*sums.values()]).sum(0)))
    return Written(len(changed), size, complete_config(out)), tuple(survivals)


def _sums(change: Tensor, rounded: Tensor) -> Tensor:
    """Return ⟨rounded, Δ⟩, ⟨Δ, Δ⟩ and ‖rounded − Δ‖², from which `Survival` follows, of a matrix in float32; `rounded`
    is what rounding left of its change Δ: Q(W + Δ) − Q(W)."""
    parts = rounded * change, change.square(), (rounded - change).square()
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


def _survival(layer: int | None, sums: Tensor) -> Survival:
    along, change, off = sums.tolist()
    return Survival(layer, along / (change or 1.0), (off / (change or 1.0)) ** 0.5)


def _open_exactly(folder: Path) -> dict[str, Stored]:
    """Open a checkpoint whose quantized tensors are read in float32."""
    return {
        name: replace(tensor, dtype="F32") if isinstance(tensor, Quantized) else tensor
        for name, tensor in open_checkpoint(folder).items()
    }


def _to_round(model: ResolvedModel, base: Mapping[str, Stored], format: Format) -> set[str]:
    """Return the names of the tensors to round, of a base that is published in another format.

    Raises `UserError` if the base stores experts in another way (one by one, or stacked) than checkpoints in the format
    do, so that no program would read the result.
    """
    mappings, structure, is_stacked = key_mappings(model.plain, base), model.structure, format.layouts[0].STACKS
    experts: set[str] = set()
    for layer in structure.moe_layers:
        for stack in stacks(layer):
            mapping = mappings[f"{layer.experts}.{stack}"]
            if stack.endswith("bias"):
                continue
            apart = mapping.has_experts_apart and mapping.only_merges
            of_gpt_oss = mapping.conversion is None and layer.shape.is_transposed
            if not (of_gpt_oss if is_stacked else apart):
                layout = "gpt-oss" if is_stacked else "models with a tensor for each expert"
                raise UserError(
                    f"--into {format.name}: of model type {structure.model_type!r} no checkpoints are published so, "
                    f"only of {layout}; export without --into, or as an adapter"
                )
            experts |= {*mapping.every_key()}
    paths = linears_to_quantize(model.plain, structure, NOTHING, model.config) if format.quantizes_linears else ()
    linears = (mappings.get(f"{path}.weight") for path in paths)
    keys = experts | {one.every_key()[0] for one in linears if one is not None and one.conversion is None}
    return {key for key in keys if base[key].shape[1] % format.into_multiple == 0}


def _write_base(base: Mapping[str, Stored], chosen: set[str], folder: Path, out: Path, format: Format) -> None:
    """Write the base to `out` with the tensors in `chosen` rounded, and all others in their dtype, or in bfloat16 if
    they are quantized; also `config.json`, read from `folder`."""

    def parts(name: str, tensor: Stored) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        if name in chosen:
            return {f"{name}_{part}".rstrip("_"): kind for part, kind in format.layout(*tensor.shape).items()}
        return {name: (torch.bfloat16 if isinstance(tensor, Quantized) else tensor.torch_dtype, tensor.shape)}

    created = create_files(base, out, parts)
    for name in chosen:
        for part, values in format.constants(*base[name].shape).items():
            created[f"{name}_{part}"].write(values)
    others = [name for name, tensor in base.items() if name not in chosen and len(tensor.shape) == 2]
    write_config(folder, out, format.settings([name.removesuffix(".weight") for name in sorted(others)]))
    places = open_checkpoint(out)
    largest: dict[str, Tensor] = {}
    if format.joins_scales:  # matrices that inference joins have one global scale
        for name in chosen:
            weight = base[name].rows().abs().max().float()
            largest[_joined(name)] = torch.maximum(largest.get(_joined(name), weight), weight)
    copy_rows({name: tensor for name, tensor in base.items() if name not in chosen}, places)
    for name in chosen:
        tensor = base[name]
        step = 1 if format.layouts[0].STACKS else tensor.num_rows
        for start in range(0, tensor.num_rows, step):
            rows = tensor.rows(start, start + step).float()
            _write(places[name], rows, start, largest.get(_joined(name)))


def _joined(name: str) -> str:
    """Return a tensor's name, changed to be equal for matrices which vLLM joins: gate and up; queries, keys, values."""
    return re.sub(r"\b(gate|up)_proj\b|\bw[13]\b", "gate_up", re.sub(r"\b[qkv]_proj\b", "qkv", name))


def _write(place: Stored, weight: Tensor, start: int, largest: Tensor | None = None, *, keep: bool = False) -> None:
    """Round float32 weights and write their data and scales in place: a whole matrix, or of a stack one expert.

    Args:
        place: the quantized tensor in the file.
        start: index of the expert; 0 for a whole matrix.
        largest, keep: as in `Format.quantize`.
    """
    assert isinstance(place, Quantized)
    stored = place.stored(start)
    rows = place.as_rows(stored)
    format = next(one for one in FORMATS.values() if place.is_in(one))
    format.quantize(weight[0].T if place.STACKS else weight, rows, largest, keep)
    for name, tensor in (stored | place.as_parts(rows)).items():
        part = place.parts[name]
        part.write(tensor.reshape(-1, *part.row_shape), start)
