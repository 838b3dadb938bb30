"""A checkpoint's seal: a manifest of what is in it, by which damage is found before anything is used."""

from __future__ import annotations

import hashlib
from pathlib import Path

from typing_extensions import TypedDict

from moetune.documents import Amount, read_sealed, sealed
from moetune.errors import UserError, one_line

MANIFEST = "manifest.json"
_BLOCK = 2**24  # bytes read at a time


class _File(TypedDict):
    bytes: Amount
    sha256: str


class _Manifest(TypedDict):
    step: Amount
    files: dict[str, _File]


def write_manifest(folder: Path, step: int) -> None:
    """Writes the manifest: each file's bytes and SHA-256."""
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in files_in(folder)
        if file.name != MANIFEST
    }
    (folder / MANIFEST).write_text(sealed({"step": step, "files": files}), encoding="utf-8")


def files_in(folder: Path) -> list[Path]:
    """Every file of a folder and of the folders in it."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, naming the file; None if every byte is as it was written."""
    try:
        return _damage(folder)
    except Exception as error:  # names that no file has, files that cannot be read
        return f"it cannot be read: {one_line(error)}"


def sealed_files(folder: Path) -> set[str]:
    """The names that a manifest lists, and its own; none where it is damaged or not there."""
    try:
        return {*read_sealed(folder / MANIFEST, _Manifest)["files"], MANIFEST}
    except UserError:
        return set()


def _damage(folder: Path) -> str | None:
    if not (folder / MANIFEST).exists():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_sealed(folder / MANIFEST, _Manifest, MANIFEST)
    except UserError as error:
        return str(error)
    if folder.name != f"step-{manifest['step']}":
        return f"it is of step {manifest['step']}, and its name says otherwise"
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size:,} bytes, not {expected['bytes']:,}"
        if _digest(file) != expected["sha256"]:
            return f"{name} was changed after it was written"
    known = manifest["files"].keys() | {MANIFEST}
    # Hidden ones are those of a file manager or a file system: .DS_Store, .nfs0001.
    there = (f for f in files_in(folder) if not f.name.startswith("."))
    unknown = sorted(name for f in there if (name := str(f.relative_to(folder))) not in known)
    return f"{unknown[0]} does not belong there; remove it" if unknown else None


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
