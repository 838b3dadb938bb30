"""The merged checkpoint: the base with what trained in its place, in the base's own files and names.

Shapes and dtypes are those of the base, so each file is copied byte for byte and then only what trained is written
over, in its place: the rest stays as it was, bit for bit, and memory holds one expert, or one block of a tensor.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from moetune.anatomy.anatomy import meta_model
from moetune.anatomy.source import resolve
from moetune.export.changes import changes, homes_of, pieces
from moetune.export.delta import about
from moetune.export.finished_run import CARRIED, FinishedRun, base_folder
from moetune.export.fingerprint import Fingerprint, take_fingerprint
from moetune.export.folder import MANIFEST, Exported, write_manifest
from moetune.export.hub_names import find_homes
from moetune.export.tensor_files import SINGLE_FILE, read_checkpoint

_FORMAT = "merged"
_NOT_CARRIED = ("adapter_*", "*.bin.index.json", "*.index.json", MANIFEST, "trainer_state.json")


def export_merged(run: FinishedRun, out: Path) -> Exported:
    """Writes base + full-precision changes + LoRA (W + scale·B·A, in float32) into the empty folder `out`.

    Raises:
        UserError: the base is not to be had, or what trained has no place in it.
    """
    folder = base_folder(run)
    base = read_checkpoint(folder)
    source = resolve(run.config.model.path)
    homes = find_homes(meta_model(source.config), base)
    targets = [(change, home) for change in changes(run) for home in homes_of(change, homes, run.adapted.anatomy.tied)]
    fingerprint = copy_checkpoint(folder, out)
    changed: set[str] = set()
    for change, home in targets:
        for piece in pieces(change, home, base):
            base[piece.key].within(out).write(piece.rows, piece.start)
            changed.add(piece.key)
    where = {"name": source.name, "fingerprint": fingerprint.to_json()}
    write_manifest(out, about(run) | {"format": _FORMAT, "base": where})
    return Exported(_FORMAT, run.step, len(changed), sum(base[key].nbytes for key in changed))


def copy_checkpoint(folder: Path, out: Path) -> Fingerprint:
    """Copies weights, index, configuration and tokenizer of a checkpoint; returns the fingerprint of the weights."""
    for pattern in CARRIED:
        for file in folder.glob(pattern):
            left_out = any(file.match(name) for name in _NOT_CARRIED)
            if file.is_file() and not left_out:
                target = out / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / SINGLE_FILE).is_file():
        shutil.copyfile(index, out / index.name)
    return take_fingerprint(folder, copy_to=out)


def bytes_needed(run: FinishedRun) -> int:
    """What a merged checkpoint of the run takes on disk, small files aside."""
    return sum(tensor.nbytes for tensor in read_checkpoint(base_folder(run)).values())
