"""The folder that an export writes: whole or not there, and what was there before is lost only to what replaces it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.exporting.folder import new_folder, write_manifest


def write(out: Path, text: str, overwrite: bool = False) -> None:
    with new_folder(out, overwrite) as folder:
        write_manifest(folder, {"format": "delta"})
        (folder / "text").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def dead() -> int:
    """The PID of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_killed_exports_go(tmp_path: Path, dead: int) -> None:
    write(tmp_path / "out", "first")
    alive = f".out-{os.getppid()}"
    others = [alive, f".outer-{dead}", ".out-mine", f".out-{dead}-mine"]
    for name in (*others, f".out-{dead}", f".out-{dead}-old", f".out-{os.getpid()}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    write(tmp_path / "out", "second", overwrite=True)
    assert names(tmp_path) == sorted([*others, "out"])
    assert (tmp_path / "out" / "text").read_text() == "second"


def test_what_a_killed_export_had_moved_away_comes_back(tmp_path: Path, dead: int) -> None:
    write(tmp_path / "out", "first")
    (tmp_path / "out").rename(tmp_path / f".out-{dead}-old")
    with pytest.raises(UserError, match=r"--out '.*out' is not empty"):
        write(tmp_path / "out", "second")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "text").read_text() == "first"


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "first")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == f".out-{os.getpid()}":
            raise OSError(5, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(UserError, match=r"--out '.*out' cannot be written: Input/output error"):
        write(tmp_path / "out", "second", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "text").read_text() == "first"


@pytest.mark.parametrize(
    ("number", "named"),
    [(2, r"'.*base/model\.safetensors' cannot be read or written: x"), (28, r"--out '.*out' .*: x")],
)
def test_the_file_that_failed_is_named(number: int, named: str, tmp_path: Path) -> None:
    """A full disk is the output's, whatever file is named."""
    with pytest.raises(UserError, match=named), new_folder(tmp_path / "out", overwrite=False):
        raise OSError(number, "x", str(tmp_path / "base" / "model.safetensors"))
    with (
        pytest.raises(UserError, match=r"--out '.*out' cannot be written: x"),
        new_folder(tmp_path / "out", overwrite=False) as folder,
    ):
        raise OSError(number, "x", str(folder / "model.safetensors"))
    assert names(tmp_path) == []
