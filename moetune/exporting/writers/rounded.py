"""`write_rounded`: a merged checkpoint in a quantized format, and how much of the training survives.

A base that is published in the format is copied byte for byte, and the tensors that trained are rounded again, under
the same names. Of any other base, experts and linear layers of the decoder are rounded, and all else is in 16 bits.

Shapes: a matrix is [out, in].
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moetune.config.schema import Into
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base, manifest_entries
from moetune.exporting.folder import Written, write_export_manifest
from moetune.exporting.writers.merged import complete_config, copy_rows, create_files, write_config
from moetune.exporting.writers.updates import new_rows, placed, updates
from moetune.formats.base import Quantized, largest_of
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.rounding import Rounding, joined_name, rounding_into
from moetune.formats.table import FORMATS
from moetune.models.hub.fingerprint import take_fingerprint
from moetune.models.hub.snapshot import copy_small_file, small_files
from moetune.run.merge_into import keys_to_round
from moetune.tensor_files import INDEX_FILE, SINGLE_FILE, Stored


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
    base = _open_exactly(folder)
    rounding = rounding_into(into, model.source.quantization.base, base.values())
    is_published = rounding.keep
    targets = placed(model, updates(run), base)
    largest: dict[str, Tensor] = {}
    chosen = set[str]() if is_published else keys_to_round(model, base, rounding.format)
    for file in small_files(folder):
        copy_small_file(file, folder, out)
    if is_published:
        if not (folder / SINGLE_FILE).is_file():
            copy_small_file(folder / INDEX_FILE, folder, out)
        fingerprint = take_fingerprint(folder, copy_to=out)
    else:
        fingerprint = take_fingerprint(folder)
        largest = _write_base(base, chosen, folder, out, rounding)
    of_base = confirmed_base(run, folder, fingerprint)
    output = _open_exactly(out)
    sums: dict[int | None, Tensor] = {}
    changed: set[str] = set()
    for update, mapping in targets:
        number = re.search(r"\.(\d+)\.", update.parameter)
        layer = None if number is None else int(number[1])
        new: Iterable[tuple[str, int, Tensor]] = new_rows(update, mapping, base, into=output)
        of_expert: dict[str, Tensor] = {}
        if update.expert is not None:
            new = [*new]  # its gate and up, which have one scale
            of_expert = _largest((key, rows) for key, _, rows in new)
        for key, start, rows in new:
            changed.add(key)
            if not isinstance(target := output[key], Quantized):
                target.write(rows, start)
                continue
            stop = start + len(rows)
            before = target.rows(start, stop)
            of_joined, weight = largest.get(joined_name(key)), rows.float()
            allowed = of_expert[joined_name(key)] if of_expert else rounding.largest(weight, of_joined)
            _write(target, weight, start, None if is_published else allowed, keep=is_published)
            rounded = target.rows(start, stop) - before
            of_matrix = _sums(rows.float() - base[key].rows(start, stop).float(), rounded)
            sums[layer] = sums[layer] + of_matrix if layer in sums else of_matrix
    write_export_manifest(out, manifest_entries(run) | {"format": "merged", "into": into, "base": of_base.to_json()})
    written = (output[key] for key in changed)
    parts = (part for whole in written for part in (whole.parts.values() if isinstance(whole, Quantized) else (whole,)))
    size = sum(part.nbytes for part in parts)
    ordered = sorted(sums, key=lambda layer: (layer is None, layer or 0))
    survivals = [_survival(layer, sums[layer]) for layer in ordered]
    if sums:
        survivals.append(_survival(None, torch.stack([*sums.values()]).sum(0)))
    return Written(len(changed), size, complete_config(out, {})), tuple(survivals)


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


def _write_base(
    base: Mapping[str, Stored], chosen: set[str], folder: Path, out: Path, rounding: Rounding
) -> dict[str, Tensor]:
    """Write the base to `out` with the tensors in `chosen` rounded, and all others in their dtype, or in bfloat16 if
    they are quantized; also `config.json`, read from `folder`. Return what `_largest` does, of the tensors in
    `chosen`."""
    format = rounding.format

    def parts(name: str, tensor: Stored) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        if name in chosen:
            return {f"{name}_{part}".rstrip("_"): kind for part, kind in format.layout(*tensor.shape).items()}
        return {name: (torch.bfloat16 if isinstance(tensor, Quantized) else tensor.torch_dtype, tensor.shape)}

    created = create_files(base, out, parts)
    for name in chosen:
        for part, values in format.constants(*base[name].shape).items():
            created[f"{name}_{part}"].write(values)
    unrounded = [name for name, tensor in base.items() if name not in chosen and len(tensor.shape) == 2]
    write_config(folder, out, format.settings([name.removesuffix(".weight") for name in sorted(unrounded)]))
    output = open_checkpoint(out)
    largest = _largest((name, base[name].rows()) for name in chosen if format.joins_scales)
    copy_rows({name: tensor for name, tensor in base.items() if name not in chosen}, output)
    for name in chosen:
        tensor = base[name]
        step = 1 if format.layouts[0].STACKS else tensor.num_rows
        for start in range(0, tensor.num_rows, step):
            rows = tensor.rows(start, start + step).float()
            _write(output[name], rows, start, largest.get(joined_name(name)))
    return largest


def _largest(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the largest magnitude of all weights whose names have one `joined_name`, by that name."""
    largest: dict[str, Tensor] = {}
    for name, weight in weights:
        own, joined = largest_of(weight), joined_name(name)
        largest[joined] = torch.maximum(largest.get(joined, own), own)
    return largest


def _write(target: Stored, weight: Tensor, start: int, largest: Tensor | None = None, *, keep: bool = False) -> None:
    """Round float32 weights and write their data and scales in place: a whole matrix, or of a stack one expert.

    Args:
        target: the quantized tensor in the file.
        start: index of the expert; 0 for a whole matrix.
        largest, keep: as in `Format.quantize`.
    """
    assert isinstance(target, Quantized)
    stored = target.stored(start)
    rows = target.as_rows(stored)
    format = next(format for format in FORMATS.values() if target.is_in(format))
    format.quantize(weight[0].T if target.STACKS else weight, rows, largest, keep)
    for name, tensor in (stored | target.as_parts(rows)).items():
        part = target.parts[name]
        part.write(tensor.reshape(-1, *part.row_shape), start)
