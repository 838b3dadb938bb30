"""The merged checkpoint: the base with what trained in its place, in the base's own files and names.

Shapes and dtypes are those of the base, so each file is copied byte for byte and then only what trained is written
over, in its place: the rest stays as it was, bit for bit, and memory holds one expert, or one block of a tensor. A base
that is published quantized is written as what it stands for, in 16 bits.
"""

from __future__ import annotations

from pathlib import Path

from moetune.exporting.base_copy import copy_checkpoint
from moetune.exporting.changes import changes, homes_of, pieces
from moetune.exporting.finished_run import FinishedRun, about, base_folder, confirmed_base
from moetune.exporting.folder import Exported, write_manifest
from moetune.models.hub.names import key_mappings
from moetune.models.hub.quantized import Quantized, open_checkpoint

_FORMAT = "merged"


def export_merged(run: FinishedRun, out: Path) -> Exported:
    """Writes base + full-precision changes + LoRA (W + scale·B·A, in float32) into the empty folder `out`.

    Raises:
        UserError: the base is not to be had, has changed, or has no place for what trained.
    """
    folder = base_folder(run)
    base = open_checkpoint(folder)
    homes = key_mappings(run.adapted.run.model.plain, base)
    targets = [
        (change, home) for change in changes(run) for home in homes_of(change, homes, run.adapted.structure.tied)
    ]
    fingerprint, places = copy_checkpoint(folder, out)
    of_base = confirmed_base(run, folder, fingerprint)
    changed: set[str] = set()
    for change, home in targets:
        for piece in pieces(change, home, base):
            places[piece.key].write(piece.rows, piece.start)
            changed.add(piece.key)
    is_unpacked = any(isinstance(tensor, Quantized) for tensor in base.values())
    method = run.adapted.run.model.source.quantization.method
    notes = (f"the base is published quantized ({method}); all weights are in 16 bits here",) if is_unpacked else ()
    write_manifest(out, about(run) | {"format": _FORMAT, "base": of_base.to_json()})
    return Exported(_FORMAT, run.step, len(changed), sum(base[key].nbytes for key in changed), notes)


def bytes_needed(run: FinishedRun) -> int:
    """What a merged checkpoint of the run takes on disk, small files aside."""
    return sum(tensor.nbytes for tensor in open_checkpoint(base_folder(run)).values())
