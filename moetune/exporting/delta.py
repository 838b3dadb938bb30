"""The delta: what full-precision training changed, under the checkpoint's own tensor names.

What is in the folder: models/hub/delta_folder.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from moetune.errors import UserError
from moetune.exporting.changes import Change, changes, homes_of, pieces
from moetune.exporting.finished_run import FinishedRun, about, base_folder, confirmed_base
from moetune.exporting.folder import Exported, write_manifest
from moetune.models.hub.delta_folder import DELTA_FILE, FORMAT
from moetune.models.hub.fingerprint import digest, take_fingerprint
from moetune.models.hub.names import KeyMapping, key_mappings
from moetune.models.hub.quantized import open_checkpoint
from moetune.models.hub.tensor_files import Stored, create_file


def export_delta(run: FinishedRun, out: Path) -> Exported:
    """Writes the delta of a run into the empty folder `out`. Reads of the base all bytes once, and keeps none.

    Raises:
        UserError: nothing but LoRA trained, or the base is not to be had, or has changed.
    """
    every = changes(run)
    full = [change for change in every if not change.base_matters]
    if not full:
        raise UserError(
            f"{run} trained only LoRA, and a delta holds full-precision changes; use "
            "--format peft for the adapter, or --format merged"
        )
    folder = base_folder(run)
    of_base = confirmed_base(run, folder, take_fingerprint(folder))
    base = open_checkpoint(folder)
    homes = key_mappings(run.adapted.run.model.plain, base)
    targets = [(change, home) for change in full for home in homes_of(change, homes, run.adapted.structure.tied)]
    layout = _layout(targets, base)
    written = create_file(out / DELTA_FILE, {key: (place.dtype, place.shape) for key, place in layout.items()})
    for change, home in targets:
        for piece in pieces(change, home, base):
            written[piece.key].write(piece.rows, layout[piece.key].row(piece.start))
    manifest = about(run) | {
        "format": FORMAT,
        "base": of_base.to_json(),
        "sha256": digest(out / DELTA_FILE),
        "slices": {key: place.experts for key, place in layout.items() if place.experts is not None},
    }
    write_manifest(out, manifest)
    notes = () if len(full) == len(every) else ("LoRA factors are not in the delta; --format peft or merged has them",)
    return Exported(FORMAT, run.step, len(layout), sum(tensor.nbytes for tensor in written.values()), notes)


@dataclass(frozen=True)
class _Place:
    """One tensor of a delta. `experts` are those that it has the rows of, where it has not all of the stack's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    experts: list[int] | None

    def row(self, row_of_base: int) -> int:
        return row_of_base if self.experts is None else self.experts.index(row_of_base)


def _layout(targets: Iterable[tuple[Change, KeyMapping]], base: dict[str, Stored]) -> dict[str, _Place]:
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
