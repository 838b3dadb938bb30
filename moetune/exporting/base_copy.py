"""A copy of a checkpoint in hub format: weights, configuration, tokenizer. No code, no pickles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moetune.hub.fingerprint import Fingerprint, take_fingerprint
from moetune.hub.snapshot import copy_small_file, small_files
from moetune.hub.tensor_files import INDEX_FILE, SINGLE_FILE


def copy_checkpoint(folder: Path, out: Path, on_read: Callable[[int], None] | None = None) -> Fingerprint:
    """Copies a checkpoint into the empty folder `out`, in blocks; returns the fingerprint of its weights.

    Args:
        on_read: is told the bytes of each block of weights.

    Raises:
        UserError: no safetensors in the folder, a file is damaged, or a link leads out of the folder.
    """
    for file in small_files(folder):
        copy_small_file(file, folder, out)
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        copy_small_file(folder / INDEX_FILE, folder, out)
    return take_fingerprint(folder, copy_to=out, on_read=on_read)
