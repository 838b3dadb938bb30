"""What was recorded of a kind of run, in memory and on disk: arrays as NumPy files, all else as JSON. Nothing in a file
executes when it is read.

They lie in `$MOETUNE_CACHE`, or `$XDG_CACHE_HOME/moetune`, or `~/.cache/moetune`; a file that cannot be read or written
is as if there were none. Names carry a digest of the run's kind, of the versions of what made the record, and of
moetune's own source, so that an old one is never found.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from moetune.documents import parse_json
from moetune.files import expanded
from moetune.memory.closed_form.record import Kind, Piece, Record
from moetune.memory.closed_form.sizes import Shape
from moetune.memory.report import LoadPeaks

_MADE_BY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


@dataclass(frozen=True)
class KnownTail:
    """Of a model's tail what decides how the loss divides its tokens, as `Tail` has it, and whether it trains."""

    vocabulary: int
    width: int
    row_bytes: int
    trains: bool


@dataclass(frozen=True)
class Recorded:
    """Of one rank of a kind of run: the model's tail, the peaks before the first step, and steps by their shapes."""

    tail: KnownTail
    load: LoadPeaks
    records: dict[Shape, Record] = field(default_factory=dict)


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
    if own := os.environ.get("MOETUNE_CACHE"):
        return expanded(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetune" / "closed_form"


def read(key: str) -> Recorded | None:
    """What there is under a name, if anything."""
    try:
        with np.load(folder() / f"{key}.npz", allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        said = parse_json(str(arrays.pop("said")).encode(), dict[str, Any], key)
        records = {
            _shape(one["shape"]): _record(one, {n[len(p) :]: a for n, a in arrays.items() if n.startswith(p)})
            for p, one in said["records"].items()
        }
        return Recorded(KnownTail(**said["tail"]), LoadPeaks(**said["load"]), records)
    except Exception:  # whatever is wrong with it: it is made again
        return None


def write(key: str, recorded: Recorded) -> None:
    """Keeps it all under that name, whole or not at all."""
    said: dict[str, Any] = {"tail": asdict(recorded.tail), "load": asdict(recorded.load), "records": {}}
    arrays: dict[str, np.ndarray] = {}
    for number, (shape, record) in enumerate(recorded.records.items()):
        prefix = f"{number}."
        said["records"][prefix] = {
            "shape": asdict(shape),
            "powers": record.powers,
            "named": [list(asdict(kind).values()) for kind in record.named],
            "pieces": [[piece.unit, piece.backward, piece.phase, piece.micro_step] for piece in record.pieces],
            "copies": record.copies,
            "groups": record.groups,
        }
        arrays |= {f"{prefix}{name}": array for name, array in _arrays(record)}
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), suffix=".npz", delete=False) as file:
            np.savez(file, said=np.array(json.dumps(said)), **arrays)  # type: ignore[arg-type]
        os.replace(file.name, folder() / f"{key}.npz")
    except OSError:
        return  # it is made again next time


_PIECE = ("blocks", "signs", "once", "once_signs")
_RECORD = ("coefficients", "monomials", "experts", "held_out", "places", "kinds")


def _arrays(record: Record) -> Iterator[tuple[str, np.ndarray]]:
    yield from ((name, getattr(record, name)) for name in _RECORD)
    for name in _PIECE:  # of all pieces, end to end
        parts = [getattr(piece, name) for piece in record.pieces]
        yield name, np.concatenate(parts)
        yield f"{name}_lengths", np.array([len(part) for part in parts])


def _record(said: dict[str, Any], arrays: dict[str, np.ndarray]) -> Record:
    columns = [np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1]) for name in _PIECE]
    pieces = tuple(
        Piece(blocks, signs, unit, backward, once, once_signs, phase, micro_step)
        for blocks, signs, once, once_signs, (unit, backward, phase, micro_step) in zip(
            *columns, said["pieces"], strict=True
        )
    )
    powers = tuple(tuple((name, exponent) for name, exponent in power) for power in said["powers"])
    copies = tuple(tuple(tuple(group) for group in unit) for unit in said["copies"])
    return Record(
        **{name: arrays[name] for name in _RECORD},
        powers=powers,
        named=tuple(Kind(*kind) for kind in said["named"]),
        pieces=pieces,
        copies=copies,
        groups=tuple(tuple(group) for group in said["groups"]),
    )


def _shape(said: dict[str, Any]) -> Shape:
    return Shape(**said | {"idle": tuple(tuple(numbers) for numbers in said["idle"])})
