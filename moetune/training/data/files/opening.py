"""Open a data file: type by name, compression by first bytes. Pointers of Git LFS are refused."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import IO, Any

import pyarrow as pa

from moetune.errors import UserError
from moetune.files import refuse_pointer

TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
RECORD_ENDINGS = (*JSON_ENDINGS, *DELIMITERS, ".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Endings of compressed files; the ending before them is the file's type."""
DAMAGED = (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError, pa.ArrowException)
"""Errors of a file that ends too early or is damaged."""


def _by_arrow(codec: str) -> Callable[..., IO[bytes]]:
    def opened(path: Any, mode: str) -> IO[bytes]:
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(path.open(mode)), codec))

    return opened


_OPENERS: dict[bytes, Callable[..., Any]] = {
    rb"\x1f\x8b\x08": gzip.open,
    rb"BZh[1-9]1AY&SY": bz2.open,
    rb"\xfd7zXZ\x00": lzma.open,
    rb"\x28\xb5\x2f\xfd": _by_arrow("zstd"),
    rb"[\x50-\x5f]\x2a\x4d\x18": _by_arrow("zstd"),  # a frame to skip, with which pzstd begins
    rb"\x04\x22\x4d\x18": _by_arrow("lz4"),
}
"""Pattern of the first bytes of a compressed file -> what opens it."""


def type_of(name: str) -> str:
    """Return the ending, in lower case, that tells what a file holds: `.jsonl` of `data.JSONL.gz`."""
    path = PurePath(name.lower())
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def opened(path: Path, name: str) -> IO[bytes]:
    """Open a file to read its bytes, unpacked if it is compressed; messages call it `name`.

    Raises:
        UserError: it is a pointer of Git LFS, or text in UTF-16.
        OSError: it cannot be opened.
    """
    refuse_pointer(path)
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{name!r} is text in UTF-16, and UTF-8 is read; convert it: iconv -f UTF-16 -t UTF-8")
    for mark, open_ in _OPENERS.items():
        if re.match(mark, head, re.DOTALL):
            handle: IO[bytes] = open_(path, "rb")
            return handle
    return path.open("rb")
