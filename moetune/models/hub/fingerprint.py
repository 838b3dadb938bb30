"""Which checkpoint exactly: its tensors' names, shapes and dtypes, and a digest of its bytes."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import model_validator

from moetune.models.hub.tensor_files import read_checkpoint, weight_files

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
        if (of_tensors := self.difference_of_tensors(other.tensors)) is not None:
            return of_tensors
        if self.content == other.content:
            return None
        changed = [
            name for name in sorted(self.files.keys() & other.files.keys()) if self.files[name] != other.files[name]
        ]
        return f"the same tensors with other values ({changed[0]})" if changed else "the same tensors in other files"

    def difference_of_tensors(self, tensors: Mapping[str, str]) -> str | None:
        """The same of names, shapes and dtypes alone (`headers`)."""
        for name in sorted(self.tensors.keys() | tensors.keys()):
            mine, its = self.tensors.get(name, "no such tensor"), tensors.get(name, "no such tensor")
            if mine != its:
                return f"{name} is {its}, not {mine}"
        return None

    def to_json(self) -> dict[str, Any]:
        return {"content": self.content, "files": dict(self.files), "tensors": dict(self.tensors)}

    @model_validator(mode="wrap")
    @classmethod
    def _check_content(cls, raw: Any, read: Callable[[Any], Fingerprint]) -> Fingerprint:
        """Refuse what `to_json` did not give."""
        made = read(raw)
        if made.content != raw.get("content"):
            raise ValueError("the fingerprint of the base is damaged")
        return made


@dataclass(frozen=True)
class Base:
    """The checkpoint that something was trained on, or was made for."""

    name: str
    fingerprint: Fingerprint

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "fingerprint": self.fingerprint.to_json()}


def take_fingerprint(
    folder: Path,
    copy_to: Path | None = None,
    on_read: Callable[[int], None] | None = None,
    part: tuple[int, int] = (0, 1),
) -> Fingerprint:
    """Read the headers, then every byte once, in blocks; with `copy_to` the files are copied there on the way.

    Args:
        on_read: called with the bytes of each block.
        part: (k, n) if n readers share the files and this is the k-th: its fingerprint has its files only.

    Raises:
        UserError: no safetensors in the folder, or a file is damaged.
    """
    files = weight_files(folder)[part[0] :: part[1]]
    return Fingerprint(headers(folder), {file.name: digest(file, copy_to, on_read) for file in files})


@contextmanager
def taking_fingerprint(folder: Path, part: tuple[int, int] = (0, 1)) -> Iterator[Callable[[], Fingerprint]]:
    """Take a fingerprint while the body of the `with` reads the same files; what is yielded waits for it."""
    files = weight_files(folder)[part[0] :: part[1]]
    with digesting(files, 1) as digests:
        yield lambda: Fingerprint(headers(folder), digests())


@contextmanager
def digesting(files: Sequence[Path], threads: int) -> Iterator[Callable[[], dict[str, str]]]:
    """Digest files in other threads while the body of the `with` runs; what is yielded waits for name -> SHA-256.

    Python's other threads run on while a digest is computed or a file is read.
    """
    left = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        taken = {file.name: pool.submit(digest, file, on_read=lambda _: _stop_if(left)) for file in files}
        try:
            yield lambda: {name: one.result() for name, one in taken.items()}
        finally:
            left.set()  # after a body that failed nobody waits for the digests


def headers(folder: Path) -> dict[str, str]:
    """The part of a fingerprint that needs no reading of weights: tensor name -> dtype and shape."""
    return {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in sorted(read_checkpoint(folder).items())}


def digest(file: Path, copy_to: Path | None = None, on_read: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, hexadecimal; with `copy_to` it is copied into that folder on the way."""
    sha256 = hashlib.sha256()
    with file.open("rb") as source, open(copy_to / file.name if copy_to else os.devnull, "wb") as target:
        while block := source.read(_BLOCK):
            sha256.update(block)
            if copy_to is not None:
                target.write(block)
            if on_read is not None:
                on_read(len(block))
    return sha256.hexdigest()


class _Left(Exception):
    """The digest is no longer needed."""


def _stop_if(left: threading.Event) -> None:
    if left.is_set():
        raise _Left
