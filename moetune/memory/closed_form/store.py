"""Records of a kind of run, in memory and on disk, as compressed JSON. Nothing in a file executes.

Files are in `$MOETUNE_CACHE`, or `$XDG_CACHE_HOME/moetune`, or `~/.cache/moetune`; one that cannot be read or written
is as if there were none. Names carry a digest of the run's kind, of the versions of what made the record, and of
moetune's own source, so that an old one is never found.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from moetune.errors import UserError
from moetune.files import check_path, write_whole
from moetune.memory.closed_form.record import Record
from moetune.memory.closed_form.sizes import Shape
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.repeat import Events

_MADE_BY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


@dataclass(frozen=True)
class KnownHead:
    """Properties of an LM head that decide how the loss divides its tokens, and whether it trains."""

    vocabulary: int
    width: int
    row_bytes: int
    trains: bool


@dataclass(frozen=True)
class Recorded:
    """Records of one rank of a kind of run: the model's LM head, and steps by their shapes."""

    head: KnownHead
    records: dict[Shape, Record] = field(default_factory=dict)
    _events: dict[Hashable, tuple[Events, np.ndarray]] = field(default_factory=dict)

    def events(self, shape: Shape, short: Shortened) -> tuple[Events, np.ndarray]:
        """Of the record of that shape the events of these layers, and [storages] the decoder layer at work when each
        storage is born; -1 outside of layers."""
        key = shape, short.kept, short.units
        if key not in self._events:
            self._events[key] = self.records[shape].repeated(short)
        return self._events[key]


def key_of(kind: dict[str, Any], rank: int) -> str:
    """The name of the records of one rank of a kind of run."""
    whole = {"kind": kind, "rank": rank, "versions": {name: version(name) for name in _MADE_BY}, "source": _source()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _source() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def folder() -> Path:
    """The folder of all records."""
    own = os.environ.get("MOETUNE_CACHE")
    try:
        if own:
            return check_path(own)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetune" / "closed_form"
    except (ValueError, RuntimeError) as error:
        raise UserError(f"MOETUNE_CACHE: {own!r} cannot be a path: {error}; set it to a folder") from None


@cache
def _content() -> TypeAdapter[tuple[str, KnownHead, list[tuple[Shape, Record]]]]:
    """A file's content: its key, the LM head, the records."""
    return TypeAdapter(tuple[str, KnownHead, list[tuple[Shape, Record]]])


def read(key: str) -> Recorded | None:
    """Read a file; None if there is none that is whole."""
    try:
        own, head, records = _content().validate_json(gzip.decompress(_file(key).read_bytes()))
    except UserError:
        raise
    except Exception:  # whatever is wrong with it: it is made again
        return None
    return Recorded(head, dict(records)) if own == key else None  # else it is another's, under this name


def write(key: str, recorded: Recorded) -> None:
    """Keep it all under that name, whole or not at all."""
    content = _content().dump_json((key, recorded.head, list(recorded.records.items())))
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_whole(_file(key), gzip.compress(content, 1))
    except OSError:
        return  # it is made again next time


def _file(key: str) -> Path:
    return folder() / f"{key}.json.gz"
