"""What was recorded of a kind of run, in memory and on disk: arrays as NumPy files, all else as JSON. Nothing in a file
executes when it is read.

They lie in `$MOETUNE_CACHE`, or `$XDG_CACHE_HOME/moetune`, or `~/.cache/moetune`; a file that cannot be read or written
is as if there were none. Names carry a digest of the run's kind, of the versions of what made the record, and of
moetune's own source, so that an old one is never found.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from moetune.documents import parse_json
from moetune.errors import UserError
from moetune.files import check_path, write_whole
from moetune.memory.closed_form.record import Record
from moetune.memory.closed_form.sizes import Shape
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.log import Block, Cut, Log, Mark
from moetune.memory.trace.repeat import Events

_MADE_BY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


@dataclass(frozen=True)
class KnownHead:
    """Of a model's LM head what decides how the loss divides its tokens, and whether it trains."""

    vocabulary: int
    width: int
    row_bytes: int
    trains: bool


@dataclass(frozen=True)
class Recorded:
    """Of one rank of a kind of run: the model's LM head, and steps by their shapes."""

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
    """Names records of one rank of a kind of run."""
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
    """Where records lie."""
    own = os.environ.get("MOETUNE_CACHE")
    try:
        if own:
            return check_path(own)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetune" / "closed_form"
    except (ValueError, RuntimeError) as error:
        raise UserError(f"MOETUNE_CACHE: {own!r} cannot be a path: {error}; set it to a folder") from None


def read(key: str) -> Recorded | None:
    """What there is under a name, if anything."""
    file = folder() / f"{key}.npz"
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        said = parse_json(str(arrays.pop("said")).encode(), dict[str, Any], key)
        if said["key"] != key:  # another's, under its name
            return None
        records = {
            _shape(one["shape"]): _record(one, {n[len(p) :]: a for n, a in arrays.items() if n.startswith(p)})
            for p, one in said["records"].items()
        }
        return Recorded(KnownHead(**said["head"]), records)
    except Exception:  # whatever is wrong with it: it is made again
        return None


def write(key: str, recorded: Recorded) -> None:
    """Keeps it all under that name, whole or not at all."""
    said: dict[str, Any] = {"key": key, "head": asdict(recorded.head), "records": {}}
    arrays: dict[str, np.ndarray] = {}
    for number, (shape, record) in enumerate(recorded.records.items()):
        prefix = f"{number}."
        log, kinds = record.log, [_kind(block) for block in record.log.blocks]
        named = list(dict.fromkeys(kinds))
        numbers = {kind: number for number, kind in enumerate(named)}
        said["records"][prefix] = {
            "shape": asdict(shape),
            "powers": record.powers,
            "groups": record.groups,
            "named": named,
            "marks": [[mark.at, mark.step, mark.micro_step, mark.phase, mark.module] for mark in log.marks],
        }
        written = {name: getattr(record, name) for name in _RECORD} | {
            "bytes": [block.bytes for block in log.blocks],
            "owners": [_NONE if block.layer is None else block.layer for block in log.blocks],
            "kinds": [numbers[kind] for kind in kinds],
            "entries": log.entries,
            "cuts": np.reshape(log.cuts, (-1, 3)),
        }
        arrays |= {f"{prefix}{name}": np.asarray(array, dtype=np.int64) for name, array in written.items()}
    try:
        folder().mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, said=np.array(json.dumps(said)), **arrays)  # type: ignore[arg-type]
        write_whole(folder() / f"{key}.npz", content.getvalue())
    except OSError:
        return  # it is made again next time


_RECORD = ("coefficients", "monomials", "experts", "layers", "places")
_NONE = -2
"""In place of a layer's number: none; -1 is `log.OUTSIDE`."""


_KIND = ("part", "phase", "module", "op", "on_host", "fetched", "managed", "in_bank")


def _kind(block: Block) -> tuple[Any, ...]:
    """All but the bytes, the place and the layer."""
    return tuple(getattr(block, name) for name in _KIND)


def _record(said: dict[str, Any], arrays: dict[str, np.ndarray]) -> Record:
    lists = {name: arrays[name].tolist() for name in ("bytes", "owners", "kinds", "entries", "cuts")}
    kinds = [dict(zip(_KIND, kind, strict=True)) for kind in said["named"]]
    blocks = [
        Block(bytes=size, layer=None if owner == _NONE else owner, born=0, **kinds[kind])
        for size, owner, kind in zip(lists["bytes"], lists["owners"], lists["kinds"], strict=True)
    ]
    for at, entry in enumerate(lists["entries"]):
        if entry >= 0:
            blocks[entry].born = at
        else:
            blocks[~entry].died = at
    cuts = [Cut(at, layer, bool(backward)) for at, layer, backward in lists["cuts"]]
    return Record(
        Log(blocks, lists["entries"], [Mark(*mark) for mark in said["marks"]], cuts),
        **{name: arrays[name] for name in _RECORD},
        powers=tuple(tuple((name, exponent) for name, exponent in power) for power in said["powers"]),
        groups=tuple(tuple(group) for group in said["groups"]),
    )


def _shape(said: dict[str, Any]) -> Shape:
    idle = tuple(tuple(numbers) for numbers in said["idle"])
    return Shape(**said | {"idle": idle, "longer": tuple(said["longer"])})
