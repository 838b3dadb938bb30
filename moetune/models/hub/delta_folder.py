"""A delta on disk: `delta.safetensors`, a part of a checkpoint under its own names, and `manifest.json`.

    {"format": "delta", "base": {"name", "fingerprint"}, "sha256": of the tensors' file,
     "slices": {tensor: [expert, …]}, "step", "run", "selection", …}

Every tensor has the shape that the base gives it; of one that holds a layer's experts in one stack it may have only
the rows of some experts, and then `slices` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moetune.documents import Amount, read_json
from moetune.errors import UserError
from moetune.models.hub.fingerprint import Base, digest
from moetune.models.hub.tensor_files import Stored, read_header

DELTA_FILE, MANIFEST = "delta.safetensors", "manifest.json"
FORMAT = "delta"


@dataclass(frozen=True)
class _Manifest:
    format: Literal["delta"]
    base: Base
    sha256: str
    slices: dict[str, list[Amount]]
    run: Any = None
    step: Any = None
    run_file: Any = None
    selection: Any = None


@dataclass(frozen=True)
class Delta:
    """A delta folder, read; no weights yet.

    Attributes:
        base: what it was made for.
        about: where it comes from: `run`, `step`, `run_file`, `selection`.
        slices: tensor -> the experts whose rows it has, for those that have not the rows of all.
    """

    folder: Path
    base: Base
    tensors: Mapping[str, Stored]
    slices: Mapping[str, list[int]]
    about: Mapping[str, Any]


def read_delta(folder: Path) -> Delta:
    """Read manifest and header, and compares every byte of the tensors with the manifest's digest.

    Raises:
        UserError: this is no delta, or it is damaged.
    """
    what, remedy = f"{str(folder)!r} is not a delta: its {MANIFEST}", "export the delta again"
    manifest = read_json(folder / MANIFEST, _Manifest, what, remedy)
    tensors = read_header(folder / DELTA_FILE)
    for key, ids in manifest.slices.items():
        if key not in tensors or not len(set(ids)) == len(ids) == tensors[key].num_rows:
            raise UserError(f"{str(folder / MANIFEST)!r}: slices.{key} does not fit the tensors; {remedy}")
    if digest(folder / DELTA_FILE) != manifest.sha256:
        raise UserError(f"{str(folder / DELTA_FILE)!r} was changed after it was written; {remedy}")
    about = {key: getattr(manifest, key) for key in ("run", "step", "run_file", "selection")}
    return Delta(folder, manifest.base, tensors, manifest.slices, about)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an export; None if there is none that could be read."""
    with suppress(UserError):
        return read_json(folder / MANIFEST, dict[str, Any])
    return None
