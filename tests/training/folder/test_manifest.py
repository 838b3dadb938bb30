"""A checkpoint's manifest: damage of any kind is named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moetune.training.folder.manifest import damage, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step-8"
    (folder / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (folder / name).write_bytes(b"abc")
    write_manifest(folder, 8)
    assert damage(folder) is None
    return folder


CHANGES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "flipped": (lambda folder: (folder / "a").write_bytes(b"abd"), "a was changed after it was written"),
    "flipped within": (lambda folder: (folder / "inner/b").write_bytes(b"abd"), "inner/b was changed after"),
    "cut": (lambda folder: os.truncate(folder / "a", 2), "a has 2 bytes, not 3"),
    "lost": (lambda folder: (folder / "inner/b").unlink(), "inner/b is missing"),
    "more": (lambda folder: (folder / "x.bin").write_bytes(b""), "x.bin does not belong there; remove it"),
    "more within": (lambda folder: (folder / "inner/x").write_bytes(b""), "inner/x does not belong there; remove it"),
    "a file manager's": (lambda folder: (folder / ".DS_Store").write_bytes(b""), None),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "a changed manifest": (lambda folder: os.truncate(folder / "manifest.json", 40), "manifest.json"),
    "another step": (lambda folder: write_manifest(folder, 4), "it is of step 4, and its name says otherwise"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_damage_is_named(change: str, folder: Path) -> None:
    make, said = CHANGES[change]
    make(folder)
    found = damage(folder)
    assert found is None if said is None else said in str(found)
