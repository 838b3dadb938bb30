"""A delta on disk: `delta.safetensors`, a part of a checkpoint under its own names, and `manifest.json`.

    {"format": "delta", "base": {"name", "fingerprint"}, "sha256": of the tensors' file,
     "slices": {tensor: [expert, …]}, "step", "run", "selection", …}

Every tensor has the shape that the base gives it; of one that holds a layer's experts in one stack it may have only
the rows of some experts, and then `slices` says which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.errors import UserError
from moetune.hub.fingerprint import Base, digest
from moetune.hub.tensor_files import Stored, read_header

DELTA_FILE, MANIFEST = "delta.safetensors", "manifest.json"
FORMAT = "delta"


@dataclass(frozen=True)
class Delta:
    """A delta folder, read; no weights yet.

    Attributes:
        base: what it was made for.
        slices: tensor -> the experts whose rows it has, for those that have not the rows of all.
    """

    folder: Path
    base: Base
    tensors: Mapping[str, Stored]
    slices: Mapping[str, list[int]]
    manifest: Mapping[str, Any]


def read_delta(folder: Path) -> Delta:
    """Reads manifest and header, and compares every byte of the tensors with the manifest's digest.

    Raises:
        UserError: this is no delta, or it is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("format") != FORMAT:
        raise UserError(f"{str(folder)!r} is not a delta: no valid {MANIFEST} in it")
    try:
        base = Base.from_json(manifest.get("base"))
    except UserError as error:
        raise UserError(f"{str(folder / MANIFEST)!r}: {error}; export the delta again") from None
    tensors, slices = read_header(folder / DELTA_FILE), manifest.pop("slices", None)
    if not _are_slices(slices, tensors):
        raise UserError(f"{str(folder / MANIFEST)!r} is damaged: its slices do not fit the tensors")
    if digest(folder / DELTA_FILE) != manifest.get("sha256"):
        raise UserError(f"{str(folder / DELTA_FILE)!r} was changed after it was written; export the delta again")
    return Delta(folder, base, tensors, slices, manifest)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an export; None if there is none that could be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except Exception:  # whatever is wrong with it
        return None
    return manifest if isinstance(manifest, dict) else None


def _are_slices(slices: Any, tensors: Mapping[str, Stored]) -> bool:
    """Whether each names a tensor, and as many different experts as it has rows."""
    return isinstance(slices, dict) and all(
        key in tensors
        and isinstance(ids, list)
        and all(isinstance(expert, int) and expert >= 0 for expert in ids)
        and len(set(ids)) == len(ids) == tensors[key].num_rows
        for key, ids in slices.items()
    )
