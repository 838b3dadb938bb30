"""Fingerprint of a checkpoint: every tensor's name, shape and dtype, every weight file's SHA-256.

Two checkpoints with equal fingerprints have the same weights.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator

from moetune.tensor_files import finite, pieces, read_headers, weight_files

_BLOCK = 2**22  # bytes read at a time


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a checkpoint's weights.

    Attributes:
        tensors: tensor name -> dtype and shape, such as `BF16 [8, 64]`.
        files: name of a safetensors file -> hexadecimal SHA-256 of its bytes.
    """

    tensors: Mapping[str, str]
    files: Mapping[str, str]

    @property
    def content(self) -> str:
        """The digest of the checkpoint: SHA-256 of the lines `<file name> <digest>`, sorted by name."""
        return hashlib.sha256("".join(f"{n} {d}\n" for n, d in sorted(self.files.items())).encode()).hexdigest()

    def difference(self, other: "Fingerprint") -> str | None:
        """Describe in one line how `other` differs from this fingerprint; None if both are of the same weights."""
        if (of_tensors := self.difference_of_tensors(other.tensors)) is not None:
            return of_tensors
        if self.content == other.content:
            return None
        changed = [
            name for name in sorted(self.files.keys() & other.files.keys()) if self.files[name] != other.files[name]
        ]
        return f"the same tensors with other values ({changed[0]})" if changed else "the same tensors in other files"

    def difference_of_tensors(self, tensors: Mapping[str, str]) -> str | None:
        """Return the first difference in tensor names, shapes or dtypes in one line; None if there is none.

        `tensors` describes the other checkpoint: tensor name -> dtype and shape, such as `BF16 [8, 64]`.
        """
        for name in sorted(self.tensors.keys() | tensors.keys()):
            own, given = self.tensors.get(name, "no such tensor"), tensors.get(name, "no such tensor")
            if own != given:
                return f"{name} is {given}, not {own}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; its `content` lets a reader detect damage."""
        return {"content": self.content, "files": dict(self.files), "tensors": dict(self.tensors)}

    @model_validator(mode="wrap")
    @classmethod
    def _check_content(cls, raw: Any, read: "Callable[[Any], Fingerprint]") -> "Fingerprint":
        """Validate the JSON object `raw` from `to_json` by `read`, pydantic's own validation; raise `ValueError` if its
        `content` is not the digest of its `files`."""
        fingerprint = read(raw)
        if fingerprint.content != raw.get("content"):
            raise ValueError("the fingerprint of the base is damaged")
        return fingerprint


@dataclass(frozen=True)
class Base:
    """A base checkpoint: the one that a training run, a delta or a quantized base was derived from.

    `name` is the model's, for messages only: the fingerprint identifies the checkpoint.
    """

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
    """Compute the fingerprint of a checkpoint folder; every byte of its weight files is read once.

    Args:
        copy_to: an existing folder to copy the weight files to while they are read; None for no copy.
        on_read: called after each block with its number of bytes, for progress.
        part: (k, n) to read only every n-th weight file from the k-th on, so that n processes share the work; `files`
            of the result then lists these files only.

    Raises:
        UserError: there are no safetensors in the folder, or a file is damaged; or, with `copy_to`, a value in it is
            not finite.
    """
    files = weight_files(folder)[part[0] :: part[1]]
    return Fingerprint(headers(folder), {file.name: digest(file, copy_to, on_read) for file in files})


@contextmanager
def taking_fingerprint(folder: Path, part: tuple[int, int] = (0, 1)) -> Iterator[Callable[[], Fingerprint]]:
    """Compute a fingerprint in another thread while the body of the `with` reads the same files.

    Yields a function that waits for the digests and returns the fingerprint; call it inside the body. `part` is (k, n)
    to read only every n-th weight file from the k-th on, and to list only these in `files`. Raises `UserError` if there
    are no safetensors in the folder, or a file is damaged.
    """
    files = weight_files(folder)[part[0] :: part[1]]
    with digesting(files, 1) as digests:
        yield lambda: Fingerprint(headers(folder), digests())


@contextmanager
def digesting(files: Sequence[Path], threads: int) -> Iterator[Callable[[], dict[str, str]]]:
    """Compute the SHA-256 of files in background threads while the body of the `with` runs.

    Yields a function that waits for all digests and returns file name -> hexadecimal SHA-256; call it inside the body.
    Hashing and reading release Python's interpreter lock, so the body continues meanwhile. Leaving the body stops
    digests that are not finished.
    """
    left = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        taken = {file.name: pool.submit(digest, file, on_read=lambda _: _stop_if(left)) for file in files}
        try:
            yield lambda: {name: future.result() for name, future in taken.items()}
        finally:
            left.set()  # stop unfinished digests, which are not needed after a failed body


def headers(folder: Path) -> dict[str, str]:
    """Return tensor name -> dtype and shape, such as `BF16 [8, 64]`, of a checkpoint, from the file headers alone."""
    return {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in sorted(read_headers(folder).items())}


def digest(file: Path, copy_to: Path | None = None, on_read: Callable[[int], None] | None = None) -> str:
    """Return the hexadecimal SHA-256 of a file; with `copy_to`, an existing folder, also copy the file there.

    A file that is copied must be in safetensors; `UserError` if a tensor in it holds a NaN or an infinity. `on_read` is
    called with the number of bytes of each block.
    """
    sha256, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with file.open("rb") as source, open(copy_to / file.name if copy_to else os.devnull, "wb") as target:
        for size, tensor in repeat((_BLOCK, None)) if copy_to is None else pieces(file):
            if not (count := source.readinto(buffer[:size])):
                break
            block = buffer[:count]
            sha256.update(block)
            if tensor is not None:
                finite(torch.frombuffer(block, dtype=tensor.torch_dtype), tensor.name, file)
            if copy_to is not None:
                target.write(block)
            if on_read is not None:
                on_read(count)
    return sha256.hexdigest()


class _Left(Exception):
    """Raised in a digest thread to stop it, once its result is no longer needed."""


def _stop_if(left: threading.Event) -> None:
    if left.is_set():
        raise _Left
