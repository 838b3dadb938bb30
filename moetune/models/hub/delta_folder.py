"""Format and reader of a delta: tensors trained in full precision, and `manifest.json`.

    {"format": "delta", "base": {"name", "fingerprint"}, "sha256": SHA-256 of delta.safetensors,
     "slices": {tensor: [expert, …]}, "step", "run", "selection", …}

Tensors have the names and shapes of the base checkpoint, the one that training began with. If a tensor holds all
experts of a layer, the delta may contain only the rows of some experts, whose ids `slices` lists.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moetune.errors import UserError
from moetune.json_files import Amount, read_json
from moetune.models.hub.fingerprint import Base, digest
from moetune.tensor_files import Stored, read_header

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
    """A delta folder whose manifest and header have been read; tensor values are read on demand.

    Attributes:
        tensors: tensor name -> where it is in `delta.safetensors`.
        slices: tensor name -> ids of the experts whose rows it has; tensors with all rows are not listed.
        about: origin of the delta, from the manifest: `run`, `step`, `run_file` and `selection`; values may be None.
    """

    folder: Path
    base: Base
    tensors: Mapping[str, Stored]
    slices: Mapping[str, list[int]]
    about: Mapping[str, Any]


def read_delta(folder: Path) -> Delta:
    """Read a delta's manifest and header, and verify the SHA-256 of its tensor file.

    Raises:
        UserError: the folder holds no delta, its manifest contradicts the tensors, or the tensor file was changed.
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
    """Return the contents of `manifest.json` in an export folder of any format; None if there is no readable one."""
    with suppress(UserError):
        return read_json(folder / MANIFEST, dict[str, Any])
    return None
