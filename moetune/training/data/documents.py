"""Documents, and rows of them, in files that are mapped into memory, so that a data set may be larger than it.

The files have no name: the system removes them with the process, however that ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from moetune.errors import UserError
from moetune.training.step.loss import IGNORED

Block = Mapping[str, np.ndarray | Sequence[np.ndarray]]
"""Rows: the values of each column, an array for each row."""


@dataclass(frozen=True, eq=False)
class Document:
    """A document as `ids` and `labels`, int32 [length], with at least 2 tokens.

    The first label is `IGNORED`, because nothing predicts a first token. A `divisible` document may be cut into several
    sequences; others, such as a prompt and its completion, may not.
    """

    ids: np.ndarray
    labels: np.ndarray
    divisible: bool

    def __len__(self) -> int:
        return len(self.ids)

    def segment(self, start: int, stop: int) -> Document:
        """Return the tokens from `start` to `stop`, the first of them as context without a loss."""
        labels = self.labels[start:stop].copy()
        labels[0] = IGNORED
        return Document(self.ids[start:stop], labels, self.divisible)

    def shortened(self, longest: int) -> tuple[Document, bool]:
        """Return its first tokens up to the end of the last whole stretch that trains, and whether there is one."""
        ends = np.flatnonzero((self.labels[:longest] != IGNORED) & (self.labels[1 : longest + 1] == IGNORED)) + 1
        return (self.segment(0, int(ends[-1])), True) if len(ends) else (self.segment(0, longest), False)


class Documents:
    """Documents in the order of addition, 17 bytes of each in memory. None is added after the first read."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lengths = array("i")
        self._divisible = bytearray()

    def add(self, document: Document) -> None:
        """Append a document; raise `UserError` if the disk is full."""
        with _naming_the_disk():
            self._file = self._file or _temporary()
            self._file.write(np.concatenate([document.ids, document.labels]).tobytes())
        self._lengths.append(len(document))
        self._divisible.append(document.divisible)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: int) -> Document:
        start, length = int(self._starts[number]), self._lengths[number]
        ids, labels = self._tokens[start : start + 2 * length].reshape(2, length)
        return Document(ids, labels, bool(self._divisible[number]))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each, int32."""
        return np.array(self._lengths)

    @cached_property
    def _starts(self) -> np.ndarray:
        return 2 * (np.cumsum(self.lengths, dtype=np.int64) - self.lengths)

    @cached_property
    def _tokens(self) -> np.ndarray:
        assert self._file is not None
        with _naming_the_disk():
            return np.frombuffer(_mapped(self._file), np.int32)


@dataclass(frozen=True)
class Chosen(Sequence[Document]):
    """A choice of documents, by their numbers; one may occur several times."""

    documents: Documents
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.documents[self.numbers[index]]


def rows_on_disk(names: Sequence[str], blocks: Iterable[Block]) -> datasets.Dataset:
    """Write rows of int32 lists to disk and return them; raise `UserError` if the disk is full."""
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
    with _naming_the_disk():
        file = _temporary()
        with pa.ipc.new_stream(file, schema) as writer:
            for block in blocks:
                writer.write_batch(pa.record_batch([_list_array(block[name]) for name in names], schema=schema))
        table = pa.ipc.open_stream(pa.py_buffer(_mapped(file))).read_all()
    return datasets.Dataset(table, fingerprint=secrets.token_hex(8))  # without one all of it is hashed, in memory


def values(rows: datasets.Dataset, name: str) -> Iterator[np.ndarray]:
    """Yield the values of a column, some rows at a time."""
    for chunk in rows.data.column(name).chunks:
        yield pc.list_flatten(chunk).to_numpy(zero_copy_only=False)


def _list_array(rows: np.ndarray | Sequence[np.ndarray]) -> pa.ListArray:
    # Straight from numpy: `Dataset.from_dict` goes through Python objects, at several times the memory.
    offsets = np.cumsum([0, *map(len, rows)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(rows)))


def _folder() -> str:
    """Return the folder for temporary files: not /tmp, which is in memory on many machines."""
    return os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir())


def _temporary() -> IO[bytes]:
    return tempfile.TemporaryFile(dir=_folder(), buffering=2**20)


def _mapped(file: IO[bytes]) -> mmap.mmap:
    file.flush()
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def _naming_the_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the tokens of the data are kept in temporary files in {_folder()!r}, and they cannot be written there: "
            f"{error.strerror or error}; set TMPDIR to a folder with room, 24 bytes a token"
        ) from error
