"""The merged checkpoint: the base with what trained in its place, in the base's own files and names.

Each file is copied byte for byte, then the rows that trained are overwritten in place: all else stays bit-equal, and
memory holds one expert, or one block of a tensor. A base that is published quantized is written in 16 bits.
"""

from __future__ import annotations

from pathlib import Path

from moetune.exporting.base_copy import copy_checkpoint
from moetune.exporting.finished_run import FinishedRun, about, base_folder, confirmed_base
from moetune.exporting.folder import Written, write_manifest
from moetune.exporting.updates import new_rows, placed, updates
from moetune.models.hub.quantized import Quantized, open_checkpoint


def write_merged(run: FinishedRun, out: Path) -> Written:
    """Write base + full-precision changes + LoRA (W + scale·B·A, in float32).

    Raises:
        UserError: the base is missing, has changed, or has no tensor for what trained.
    """
    folder = base_folder(run)
    base = open_checkpoint(folder)
    targets = placed(run, updates(run), base)
    fingerprint, places = copy_checkpoint(folder, out)
    of_base = confirmed_base(run, folder, fingerprint)
    changed: set[str] = set()
    for update, mapping in targets:
        for key, start, rows in new_rows(update, mapping, base):
            places[key].write(rows, start)
            changed.add(key)
    notes: tuple[str, ...] = ()
    if any(isinstance(tensor, Quantized) for tensor in base.values()):
        method = run.adapted.run.model.source.quantization.method
        notes = (f"the base is published quantized ({method}); all weights are in 16 bits here",)
    write_manifest(out, about(run) | {"format": "merged", "base": of_base.to_json()})
    return Written(len(changed), sum(base[key].nbytes for key in changed), notes)


def bytes_needed(run: FinishedRun) -> int:
    """Bytes of the weights of a merged checkpoint on disk."""
    return sum(tensor.nbytes for tensor in open_checkpoint(base_folder(run)).values())
