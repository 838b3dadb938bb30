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
    """Copy a checkpoint into the empty folder `out`, in blocks; one that is quantized is copied dequantized.

    Args:
        on_read: called with the bytes of each block of weights.

    Returns:
        The fingerprint of the checkpoint, and each tensor of the copy.

    Raises:
        UserError: no safetensors in the folder, a file is damaged, or a link leads out of the folder.
    """
    for file in small_files(folder):
        copy_small_file(file, folder, out)
    tensors = open_checkpoint(folder)
    if any(isinstance(tensor, Quantized) for tensor in tensors.values()):
        return take_fingerprint(folder, on_read=on_read), _dequantize(tensors, folder, out)
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        copy_small_file(folder / INDEX_FILE, folder, out)
    fingerprint = take_fingerprint(folder, copy_to=out, on_read=on_read)
    return fingerprint, {name: tensor.within(out) for name, tensor in tensors.items()}


def _dequantize(tensors: Mapping[str, Stored], folder: Path, out: Path) -> dict[str, Stored]:
    """Write tensors in the dtype that they are read in, to files of the same names, with an index and configuration."""
    written: dict[str, Stored] = {}
    for file in sorted({tensor.file.name for tensor in tensors.values()}):
        here = {name: tensor for name, tensor in tensors.items() if tensor.file.name == file}
        written |= create_file(out / file, {name: (t.torch_dtype, t.shape) for name, t in here.items()})
        for name, tensor in here.items():
            for start, stop in tensor.blocks():
                written[name].write(tensor.rows(start, stop), start)
    if not (out / SINGLE_FILE).is_file():
        size = sum(tensor.nbytes for tensor in written.values())
        files = {name: tensor.file.name for name, tensor in sorted(written.items())}
        _write_json(out / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": files})
    config = read_json(folder / "config.json", dict[str, Any])
    config.pop("quantization_config", None)
    _write_json(out / "config.json", config)
    return written


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
