"""Storage on disk of what takes seconds to predict: closed-form records, one file for each kind of run, and reports.

Files are in `$MOETUNE_CACHE`, or else in `moetune/closed_form` under `$XDG_CACHE_HOME` or `~/.cache`. Reading executes
nothing from a file. A file that cannot be read or written is treated as missing. File names are digests of the run's
kind, the rank, torch's switches, the versions of libraries and moetune's source, so that outdated records are never
found.
"""

import gzip
import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter

from moetune.errors import UserError
from moetune.files import cache_folder, source_digest, write_whole
from moetune.memory.closed_form.record import Record
from moetune.memory.closed_form.sizes import Shape
from moetune.memory.trace.alike import Stack
from moetune.memory.trace.repeat import Events

_MADE_BY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
"""Libraries whose versions a record depends on."""


@dataclass(frozen=True)
class KnownHead:
    """Properties of an LM head that decide how the loss divides its tokens.

    Attributes:
        vocabulary: number of logits of a token.
        width: bytes of a logit.
        row_bytes: bytes, for one token, of all tensors of logits that the head allocates in training.
        held_out_row_bytes: the same in an evaluation, without gradients, where LoRA on the head makes more tensors.
        trains: whether any parameter outside of the decoder stack trains.
        loops: whether the model's code loops over documents or pieces of a sequence, so that the number of tensors
            depends on its length.
        copies: whether a copy that is larger than the hidden states is made of several rows only, because an input is
            broadcast over them.
    """

    vocabulary: int
    width: int
    row_bytes: int
    held_out_row_bytes: int
    trains: bool
    loops: bool = False
    copies: bool = False


@dataclass(frozen=True)
class Recorded:
    """All records of one rank of a kind of run, by shape of the batches, and the LM head of its model. `ClosedForm`
    adds records to it."""

    head: KnownHead
    records: dict[Shape, Record] = field(default_factory=dict)
    _events: dict[Hashable, tuple[Events, np.ndarray]] = field(default_factory=dict)

    def events(self, shape: Shape, stack: Stack) -> tuple[Events, np.ndarray]:
        """Expand the record of `shape` to the whole model of `stack`: return its allocations and releases, and
        [storages] the layer in which each is allocated (`Record.repeated`). The result is cached: do not modify it.
        Raise `KeyError` if there is no record of this shape."""
        key = shape, stack
        if key not in self._events:
            self._events[key] = self.records[shape].repeated(stack)
        return self._events[key]


def key_of(kind: dict[str, Any], rank: int) -> str:
    """Return the digest that names the file of a kind of run's records for one rank: 32 hexadecimal digits. `kind` has
    the settings that the step's storages depend on, as JSON values."""
    about = {"versions": _versions(), "switches": _switches(), "source": source_digest("**/*.py")}
    whole = {"kind": kind, "rank": rank, **about}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in _MADE_BY}


def _switches() -> list[bool]:
    """Return which kernels of attention torch may choose, and whether operations must be deterministic."""
    of = torch.backends.cuda
    kernels = of.flash_sdp_enabled, of.mem_efficient_sdp_enabled, of.cudnn_sdp_enabled, of.math_sdp_enabled
    return [is_on() for is_on in (*kernels, torch.are_deterministic_algorithms_enabled)]


def folder() -> Path:
    """Return the folder of all records, which need not exist. Raise `UserError` if `$MOETUNE_CACHE` cannot be a path,
    or there is no home folder."""
    return cache_folder("closed_form")


@cache
def _content() -> TypeAdapter[tuple[str, KnownHead, list[tuple[Shape, Record]]]]:
    """Return the type of a file's content: (key, sizes of the LM head, shapes and records)."""
    return TypeAdapter(tuple[str, KnownHead, list[tuple[Shape, Record]]])


def read(key: str) -> Recorded | None:
    """Read the records with a key; return None if their file is missing, damaged, or has another key inside. Raise
    `UserError` as `folder` does."""
    if (content := read_content(key, _content())) is None:
        return None
    _, head, records = content
    return Recorded(head, dict(records))


def write(key: str, recorded: Recorded) -> None:
    """Write the records to the file named by `key`; an error of the file system is ignored. Raise `UserError` as
    `folder` does."""
    write_content(key, _content(), (key, recorded.head, list(recorded.records.items())))


Content = TypeVar("Content", bound=tuple[Any, ...])
"""Content of a file: a tuple of its key and what is stored."""


def read_content(key: str, type_: TypeAdapter[Content]) -> Content | None:
    """Read the file named by `key`, of the type that `type_` validates; return None if it is missing, damaged, or has
    another key inside. Raise `UserError` as `folder`."""
    try:
        content = type_.validate_json(gzip.decompress(_file(key).read_bytes()))
    except UserError:
        raise
    except Exception:  # whatever is wrong with the file: a new one is made
        return None
    return content if content[0] == key else None  # a renamed file is not used


def write_content(key: str, type_: TypeAdapter[Content], content: Content) -> None:
    """Write `content`, of the type that `type_` dumps, to the file named by `key`, replacing an older one; an error of
    the file system is ignored, and the old file stays. Settings that a configuration leaves out stay left out. Raise
    `UserError` as `folder`."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        write_whole(_file(key), gzip.compress(type_.dump_json(content, exclude_unset=True), 1))
    except OSError:
        return  # made again next time


def _file(key: str) -> Path:
    return folder() / f"{key}.json.gz"
