"""A checkpoint's seal: a manifest of what is in it, by which damage is found before anything is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from moetune.errors import one_line

MANIFEST = "manifest.json"
_BLOCK = 2**24  # bytes read at a time


def write_manifest(folder: Path, step: int) -> None:
    """Writes the manifest: each file's bytes and SHA-256."""
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in files_in(folder)
        if file.name != MANIFEST
    }
    (folder / MANIFEST).write_text(_text(step, files), encoding="utf-8")


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
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        is_whole = text == _text(manifest["step"], manifest["files"])
        return {*manifest["files"], MANIFEST} if is_whole else set()
    except Exception:  # whatever is wrong with it
        return set()


def _damage(folder: Path) -> str | None:
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest: dict[str, Any] = json.loads(text)
        expected = {str(n): (int(f["bytes"]), str(f["sha256"])) for n, f in manifest["files"].items()}
        if text != _text(manifest["step"], manifest["files"]):
            return f"{MANIFEST} was changed after it was written"
        if folder.name != f"step-{manifest['step']}":
            return f"it is of step {manifest['step']}, and its name says otherwise"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except Exception:  # whatever is wrong with it
        return f"{MANIFEST} cannot be read"
    for name, (size, digest) in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes, not {size:,}"
        if _digest(file) != digest:
            return f"{name} was changed after it was written"
    known = expected.keys() | {MANIFEST}
    # Hidden ones are those of a file manager or a file system: .DS_Store, .nfs0001.
    there = (f for f in files_in(folder) if not f.name.startswith("."))
    unknown = sorted(name for f in there if (name := str(f.relative_to(folder))) not in known)
    return f"{unknown[0]} does not belong there; remove it" if unknown else None


def _text(step: int, files: dict[str, Any]) -> str:
    """The manifest, with a digest of itself."""
    body = {"schema": 1, "step": step, "files": files}
    return json.dumps({**body, "seal": hashlib.sha256(json.dumps(body).encode()).hexdigest()}, indent=2) + "\n"


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
