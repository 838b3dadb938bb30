"""A copy of a checkpoint in hub format: weights, configuration, tokenizer. No code, no pickles."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from moetune.hub.delta_folder import MANIFEST
from moetune.hub.fingerprint import Fingerprint, take_fingerprint
from moetune.hub.snapshot import CARRIED
from moetune.hub.tensor_files import INDEX_FILE, SINGLE_FILE

_LEFT_OUT = ("adapter_*", "*.index.json", MANIFEST)


def copy_checkpoint(folder: Path, out: Path, on_read: Callable[[int], None] | None = None) -> Fingerprint:
    """Copies a checkpoint into the empty folder `out`, in blocks; returns the fingerprint of its weights.

    Args:
        on_read: is told the bytes of each block of weights.

    Raises:
        UserError: no safetensors in the folder, or a file is damaged.
    """
    for pattern in CARRIED:
        for file in folder.glob(pattern):
            if file.is_file() and not any(file.match(name) for name in _LEFT_OUT):
                target = out / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        shutil.copyfile(folder / INDEX_FILE, out / INDEX_FILE)
    return take_fingerprint(folder, copy_to=out, on_read=on_read)
