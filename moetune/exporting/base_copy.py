"""A copy of a checkpoint in hub format: weights, configuration, tokenizer. No code, no pickles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moetune.documents import read_json
from moetune.models.hub.fingerprint import Fingerprint, take_fingerprint
from moetune.models.hub.quantized import Quantized, open_checkpoint
from moetune.models.hub.snapshot import copy_small_file, small_files
from moetune.models.hub.tensor_files import INDEX_FILE, SINGLE_FILE, Stored, create_file


def copy_checkpoint(
    folder: Path, out: Path, on_read: Callable[[int], None] | None = None
) -> tuple[Fingerprint, dict[str, Stored]]:
    """Copies a checkpoint into the empty folder `out`, in blocks; returns the fingerprint of its weights, and where
    each tensor is in the copy. One that is published quantized is copied as what it stands for, in 16 bits.

    Args:
        on_read: is told the bytes of each block of weights.

    Raises:
        UserError: no safetensors in the folder, a file is damaged, or a link leads out of the folder.
    """
    for file in small_files(folder):
        copy_small_file(file, folder, out)
    tensors = open_checkpoint(folder)
    if any(isinstance(tensor, Quantized) for tensor in tensors.values()):
        return take_fingerprint(folder, on_read=on_read), _unpack(tensors, folder, out)
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        copy_small_file(folder / INDEX_FILE, folder, out)
    fingerprint = take_fingerprint(folder, copy_to=out, on_read=on_read)
    return fingerprint, {name: tensor.within(out) for name, tensor in tensors.items()}


def _unpack(tensors: Mapping[str, Stored], folder: Path, out: Path) -> dict[str, Stored]:
    """Writes tensors as they are read, into files of the same names, and a configuration that calls them that."""
    written: dict[str, Stored] = {}
    for file in sorted({tensor.file.name for tensor in tensors.values()}):
        here = {name: tensor for name, tensor in tensors.items() if tensor.file.name == file}
        written |= create_file(out / file, {name: (t.torch_dtype, t.shape) for name, t in here.items()})
        for name, tensor in here.items():
            for start, stop in tensor.blocks():
                written[name].write(tensor.rows(start, stop), start)
    if not (out / SINGLE_FILE).is_file():
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in written.values())},
            "weight_map": {name: tensor.file.name for name, tensor in sorted(written.items())},
        }
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = read_json(folder / "config.json", dict[str, Any])
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return written
