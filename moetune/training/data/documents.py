"""Tokenized documents and rows in memory-mapped temporary files. A data set may exceed memory.

The files are unnamed, so the operating system removes them when the process ends, even if it is killed.
"""

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

Columns = Mapping[str, np.ndarray | Sequence[np.ndarray]]
"""Some rows, by column: an array [rows, length] or a sequence of one array per row."""


@dataclass(frozen=True, eq=False)
class Document:
    """A tokenized document.

    Attributes:
        ids: token ids, int32 [length], at least 2.
        labels: the ids of the tokens that are trained on, `IGNORED` for others, int32 [length]. The first is always
            `IGNORED`, because no token precedes it.
        divisible: whether the document may be cut into several sequences: text, but no prompt or chat.
    """

    ids: np.ndarray
    labels: np.ndarray
    divisible: bool

    def __len__(self) -> int:
        return len(self.ids)

    def segment(self, start: int, stop: int) -> "Document":
        """Return the tokens from `start` to `stop` as a document of its own, whose first token has no loss.

        The ids are a view, the labels a copy.
        """
        labels = self.labels[start:stop].copy()
        labels[0] = IGNORED
        return Document(self.ids[start:stop], labels, self.divisible)

    def shortened(self, longest: int) -> "tuple[Document, bool]":
        """Cut the document to at most `longest` tokens, after the last stretch of trained tokens that fits completely.

        A stretch is a completion, or one message of the assistant. Returns (document, whether a stretch fits); if none
        does, the document has the first `longest` tokens.
        """
        ends = np.flatnonzero((self.labels[:longest] != IGNORED) & (self.labels[1 : longest + 1] == IGNORED)) + 1
        return (self.segment(0, int(ends[-1])), True) if len(ends) else (self.segment(0, longest), False)


class Documents:
    """A sequence of documents in a temporary file, in the order of addition.

    Each document takes 13 bytes of memory, and 25 from the first read on. No document may be added after that.
    `documents[number]` reads one.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lengths = array("i")
        self._divisible = bytearray()
        self.hashes = array("q")
        """A hash of each document's tokens and labels: equal documents are known by it."""

    def add(self, document: Document) -> None:
        """Append a document; raise `UserError` if the temporary file cannot be written, as on a full disk."""
        with _naming_the_disk():
            self._file = self._file or _temporary()
            self._file.write(stored := np.concatenate([document.ids, document.labels]).tobytes())
        self.hashes.append(hash(stored))
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
        """Number of tokens of each document, int32 [documents]."""
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
    """Those of `documents` with the indices `numbers`, int64 [length], in this order; an index may occur repeatedly."""

    documents: Documents
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.documents[self.numbers[index]]


def rows_on_disk(names: Sequence[str], blocks: Iterable[Columns]) -> datasets.Dataset:
    """Write rows to a temporary file; return them as a memory-mapped data set.

    Args:
        names: the columns, each a list of int32 per row.
        blocks: the rows; each block is written before the next is computed.

    Raises:
        UserError: the temporary file cannot be written, as on a full disk.
    """
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
    with _naming_the_disk():
        file = _temporary()
        with pa.ipc.new_stream(file, schema) as writer:
            for block in blocks:
                # From numpy: `Dataset.from_dict` would create Python objects and take several times the memory.
                lists = [
                    pa.ListArray.from_arrays(
                        pa.array(np.cumsum([0, *map(len, block[name])]), pa.int32()), np.concatenate(block[name])
                    )
                    for name in names
                ]
                writer.write_batch(pa.record_batch(lists, schema=schema))
        table = pa.ipc.open_stream(pa.py_buffer(_mapped(file))).read_all()
    return datasets.Dataset(table, fingerprint=secrets.token_hex(8))  # else datasets hashes all rows, in memory


def values(rows: datasets.Dataset, name: str) -> Iterator[np.ndarray]:
    """Yield the numbers in the lists of the column `name`, in order, as int32 arrays that each join many rows."""
    for chunk in rows.data.column(name).chunks:
        yield pc.list_flatten(chunk).to_numpy(zero_copy_only=False)


def _folder() -> str:
    """Return the folder for temporary files: $TMPDIR, else /var/tmp, because /tmp is in memory on many machines."""
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
