"""Which checkpoint exactly: its tensors' names, shapes and dtypes, and a digest of its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.errors import UserError
from moetune.export.tensor_files import read_checkpoint, weight_files

_BLOCK = 2**22  # bytes read at a time


@dataclass(frozen=True)
class Fingerprint:
    """Of one checkpoint folder.

    Attributes:
        tensors: name -> dtype and shape, `BF16 [8, 64]` say.
        files: name of a safetensors file -> SHA-256 of its bytes, hexadecimal.
    """

    tensors: Mapping[str, str]
    files: Mapping[str, str]

    @property
    def content(self) -> str:
        """One SHA-256 for all files: of `name digest` lines, in the order of names."""
        return hashlib.sha256("".join(f"{n} {d}\n" for n, d in sorted(self.files.items())).encode()).hexdigest()

    def difference(self, other: Fingerprint) -> str | None:
        """Why `other` is another checkpoint, in one line; None if it is the same."""
        for name in sorted(self.tensors.keys() | other.tensors.keys()):
            mine, its = self.tensors.get(name, "no such tensor"), other.tensors.get(name, "no such tensor")
            if mine != its:
                return f"{name} is {its}, not {mine}"
        if self.content == other.content:
            return None
        changed = [
            name for name in sorted(self.files.keys() & other.files.keys()) if self.files[name] != other.files[name]
        ]
        return f"the same tensors with other values ({changed[0]})" if changed else "the same tensors in other files"

    def to_json(self) -> dict[str, Any]:
        return {"content": self.content, "files": dict(self.files), "tensors": dict(self.tensors)}

    @classmethod
    def from_json(cls, raw: Any) -> Fingerprint:
        """Raises `UserError` if this is not what `to_json` gave."""
        try:
            made = cls({str(k): str(v) for k, v in raw["tensors"].items()}, dict(raw["files"]))
            whole = made.content == raw["content"]
        except (KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise UserError("the fingerprint in the manifest is damaged")
        return made


def take_fingerprint(folder: Path, copy_to: Path | None = None) -> Fingerprint:
    """Reads the headers, then every byte once, in blocks; with `copy_to` the files are copied there on the way.

    Raises:
        UserError: no safetensors in the folder, or a file is damaged.
    """
    tensors = {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in sorted(read_checkpoint(folder).items())}
    return Fingerprint(tensors, {file.name: _digest(file, copy_to) for file in weight_files(folder)})


def _digest(file: Path, copy_to: Path | None) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source, open(copy_to / file.name if copy_to else os.devnull, "wb") as target:
        while block := source.read(_BLOCK):
            digest.update(block)
            target.write(block)
    return digest.hexdigest()
