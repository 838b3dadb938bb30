"""The delta: what full-precision training changed, under the checkpoint's own tensor names, and how to apply it.

    delta.safetensors   `model.layers.3.block_sparse_moe.experts.1.w1.weight`, `….gate.weight`, …
    manifest.json       base (name, fingerprint), step, run, selection, slices

Every tensor has the shape that the base gives it, so the file is a part of a checkpoint in hub format. The exception
are types that keep a layer's experts in one stack: of those the file has the chosen experts' rows, and
`slices: {tensor: [expert, …]}` of the manifest says which they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetune.anatomy.anatomy import meta_model
from moetune.anatomy.source import resolve
from moetune.errors import UserError
from moetune.export.base_copy import copy_checkpoint
from moetune.export.changes import Change, changes, homes_of, pieces
from moetune.export.fingerprint import Fingerprint, take_fingerprint
from moetune.export.finished_run import FinishedRun, about, base_folder
from moetune.export.folder import MANIFEST, Exported, write_manifest
from moetune.export.hub_names import Home, find_homes
from moetune.export.tensor_files import Stored, create_file, read_checkpoint, read_header

DELTA_FILE = "delta.safetensors"
_FORMAT = "delta"


def export_delta(run: FinishedRun, out: Path) -> Exported:
    """Writes the delta of a run into the empty folder `out`. Reads of the base all bytes once, and keeps none.

    Raises:
        UserError: nothing but LoRA trained, or the base is not to be had.
    """
    every = changes(run)
    full = [change for change in every if not change.base_matters]
    if not full:
        raise UserError(
            f"the run in {str(run.path)!r} trained only LoRA, and a delta holds full-precision changes; use "
            "--format peft for the adapter, or --format merged"
        )
    folder = base_folder(run)
    base = read_checkpoint(folder)
    homes = find_homes(meta_model(resolve(run.config.model.path).config), base)
    targets = [(change, home) for change in full for home in homes_of(change, homes, run.adapted.anatomy.tied)]
    layout = _layout(targets, base)
    written = create_file(out / DELTA_FILE, {key: (place.dtype, place.shape) for key, place in layout.items()})
    for change, home in targets:
        for piece in pieces(change, home, base):
            written[piece.key].write(piece.rows, layout[piece.key].row(piece.start))
    manifest = about(run) | {
        "format": _FORMAT,
        "base": {"name": resolve(run.config.model.path).name, "fingerprint": take_fingerprint(folder).to_json()},
        "slices": {key: place.experts for key, place in layout.items() if place.experts is not None},
    }
    write_manifest(out, manifest)
    notes = () if len(full) == len(every) else ("LoRA factors are not in the delta; --format peft or merged has them",)
    return Exported(_FORMAT, run.step, len(layout), sum(tensor.nbytes for tensor in written.values()), notes)


@dataclass(frozen=True)
class _Place:
    """One tensor of a delta. `experts` are those that it has the rows of, where it has not all of the stack's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    experts: list[int] | None

    def row(self, row_of_base: int) -> int:
        return row_of_base if self.experts is None else self.experts.index(row_of_base)


def _layout(targets: Iterable[tuple[Change, Home]], base: dict[str, Stored]) -> dict[str, _Place]:
    layout: dict[str, _Place] = {}
    for change, home in targets:
        for key in home.every_key():
            shape = base[key].shape
            if change.expert is None or home.has_experts_apart:
                layout[key] = _Place(change.dtype, shape, None)
                continue
            before = layout[key].experts or [] if key in layout else []
            chosen = sorted([*before, change.expert])
            layout[key] = _Place(change.dtype, (len(chosen), *shape[1:]), chosen)
    return {
        key: _Place(place.dtype, place.shape, None) if place.shape == base[key].shape else place
        for key, place in layout.items()
    }


def apply_delta(base: Path, delta: Path, out: Path, force: str | None = None) -> int:
    """Writes a copy of the checkpoint in `base` with a delta's tensors in their places; returns how many there are.

    Args:
        out: an empty folder (`folder.new_folder` gives one).
        force: the name of the folder `base`, to apply the delta although it was made for another checkpoint.

    Raises:
        UserError: the delta was made for another checkpoint, or has tensors that this one has not, or not so shaped;
            nothing has been written then.
    """
    manifest = read_manifest(delta)
    stored, places = read_header(delta / DELTA_FILE), read_checkpoint(base)
    made_for, found = Fingerprint.from_json(manifest["base"]["fingerprint"]), take_fingerprint(base)
    difference, name = made_for.difference(found), base.resolve().name
    if difference is not None and force != name:
        raise UserError(
            f"the delta in {str(delta)!r} was made for another base than {str(base)!r}: {difference}; "
            f"force={name!r} applies it all the same"
        )
    slices = manifest["slices"]
    for key, tensor in stored.items():
        rows = slices.get(key)
        fits = key in places and tensor.row_shape == places[key].row_shape
        if not fits or not _rows_fit(rows, tensor, places[key]):
            there = f"{[*places[key].shape]}" if key in places else "missing"
            raise UserError(f"{key} of the delta is {[*tensor.shape]} and {there} in {str(base)!r}")
    copy_checkpoint(base, out)
    for key, tensor in stored.items():
        place, rows = places[key].within(out), slices.get(key)
        for slot, row in enumerate(range(tensor.num_rows) if rows is None else rows):
            place.write(tensor.rows(slot, slot + 1), row)
    return len(stored)


def _rows_fit(rows: Any, tensor: Stored, place: Stored) -> bool:
    if rows is None:
        return tensor.shape == place.shape
    return isinstance(rows, list) and len(rows) == tensor.num_rows and all(row in range(place.num_rows) for row in rows)


def read_manifest(delta: Path) -> dict[str, Any]:
    """The manifest of a delta folder; raises `UserError` if it is none."""
    try:
        manifest = json.loads((delta / MANIFEST).read_text(encoding="utf-8"))
        valid = (
            manifest["format"] == _FORMAT and isinstance(manifest["slices"], dict) and manifest["base"]["fingerprint"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise UserError(f"{str(delta)!r} is not a delta: no valid {MANIFEST} in it")
    return manifest
