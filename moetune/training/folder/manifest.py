"""A checkpoint's manifest: size and SHA-256 of each file, written last."""

import hashlib
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from moetune.errors import UserError, one_line
from moetune.json_files import Amount, read_sealed, sealed
from moetune.models.hub.fingerprint import digest

MANIFEST = "manifest.json"


class _File(TypedDict):
    bytes: Amount
    sha256: str


class _Manifest(TypedDict):
    step: Amount
    files: dict[str, _File]
    metrics: NotRequired[_File]


def write_manifest(folder: Path, step: int, metrics: Path | None = None) -> None:
    """Write `manifest.json` of the complete checkpoint of `step`, with a seal (a digest of the manifest itself).

    `metrics` is the run's `metrics.jsonl`, of which the manifest has size and digest as they are now.
    """
    files = {str(file.relative_to(folder)): _file(file) for file in files_in(folder) if file.name != MANIFEST}
    about: dict[str, Any] = {"step": step, "files": files} | ({} if metrics is None else {"metrics": _file(metrics)})
    (folder / MANIFEST).write_text(sealed(about), encoding="utf-8")


def _file(path: Path) -> _File:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def begins_with(text: bytes, folder: Path) -> bytes | None:
    """Return the beginning of a `metrics.jsonl` that had been written when the checkpoint in `folder` was; None if it
    is not what it was then. A checkpoint whose manifest is damaged says nothing: all of `text` is returned."""
    try:
        metrics = read_sealed(folder / MANIFEST, _Manifest)["metrics"]
    except (UserError, KeyError):
        return text
    beginning = text[: metrics["bytes"]]
    is_same = len(beginning) == metrics["bytes"] and hashlib.sha256(beginning).hexdigest() == metrics["sha256"]
    return beginning if is_same else None


def files_in(folder: Path) -> list[Path]:
    """Return every file in a folder and its subfolders, sorted by path."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def damage(folder: Path) -> str | None:
    """Check every byte of a checkpoint folder against its manifest; return what is wrong, or None if nothing is.

    Additional files are damage too, except hidden ones.
    """
    if not (folder / MANIFEST).exists():
        return f"{MANIFEST} is missing"
    try:
        return _damage(folder, read_sealed(folder / MANIFEST, _Manifest, MANIFEST))
    except UserError as error:
        return str(error)
    except Exception as error:  # such as a listed name that no file can have, or a file without read permission
        return f"it cannot be read: {one_line(error)}"


def _damage(folder: Path, manifest: _Manifest) -> str | None:
    """Return the first difference between a checkpoint folder and its manifest; None if there is none."""
    if folder.name != f"step-{manifest['step']}":
        return f"it is of step {manifest['step']}, and its name says otherwise"
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size:,} bytes, not {expected['bytes']:,}"
        if digest(file) != expected["sha256"]:
            return f"{name} was changed after it was written"
    # File managers and file systems add hidden files, such as .DS_Store and .nfs0001, which do no harm.
    present = {str(file.relative_to(folder)) for file in files_in(folder) if not file.name.startswith(".")}
    unknown = sorted(present - manifest["files"].keys() - {MANIFEST})
    return f"{unknown[0]} does not belong there; remove it" if unknown else None
