"""The folder that an export writes: whole or not there, and what was there before is lost only to what replaces it."""

import importlib
import json
import os
import pathlib
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import moetune.exporting.folder
from moetune.errors import UserError
from moetune.exporting.folder import new_folder, write_export_manifest
from tests.processes import processes


def write(out: Path, text: str, overwrite: bool = False) -> None:
    with new_folder(out, overwrite) as folder:
        write_export_manifest(folder, {"format": "delta"})
        (folder / "text").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


MOMENTS = {
    "before the marker": ("fcntl.flock", 1),
    "before the new folder": ("pathlib.Path.mkdir", 2),
    "half written": ("moetune.exporting.folder.write_export_manifest", 1),
    "before the old one was moved away": ("pathlib.Path.rename", 1),
    "between the two renames": ("pathlib.Path.rename", 2),
    "before the old one went": ("shutil.rmtree", 1),
    "half cleared": ("pathlib.Path.rmdir", 1),
}


def killed(out: Path, function: str, call: int) -> None:
    """Writes and dies just before a call of a function."""
    path, name = function.rsplit(".", 1)
    owner = pathlib.Path if path == "pathlib.Path" else importlib.import_module(path)
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, dying)
    with new_folder(out, overwrite=True) as folder:
        moetune.exporting.folder.write_export_manifest(folder, {"format": "delta"})
        (folder / "text").write_text("second")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_loses_nothing_and_its_leftovers_go(moment: str, tmp_path: Path) -> None:
    write(tmp_path / "out", "first")
    process = processes.Process(target=killed, args=(tmp_path / "out", *MOMENTS[moment]))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(UserError, match="is not empty"):  # whichever of the two it is, it is whole
        write(tmp_path / "out", "third")
    assert (tmp_path / "out" / "text").read_text() == ("second" if moment in list(MOMENTS)[-2:] else "first")
    write(tmp_path / "out", "third", overwrite=True)
    unmarked = 1 if moment in ("before the marker", "half cleared") else 0  # one that says nothing of whose it is
    assert len(names(tmp_path)) == 1 + unmarked
    assert (tmp_path / "out" / "text").read_text() == "third"


FOREIGN = [
    ".out-20240101", ".out-2023-old", f".out-{os.getpid()}", ".out", "out-old", ".moetune-export-",
    ".moetune-export-01", ".moetune-export-0123456789abcdef", ".moetune-0", ".lock", "new", "old",
]  # fmt: skip
MARKERS = [None, b"", b"{}", b"[", json.dumps({"schema": 1, "written by": "moetune", "of": "other"}).encode()]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("marker", MARKERS)
def test_what_is_not_ours_stays(marker: bytes | None, overwrite: bool, tmp_path: Path) -> None:
    """Whatever it is called and whatever it says, and also beside an export that is refused."""
    for name in FOREIGN:
        for sub in ("", "new", "old"):
            (tmp_path / name / sub).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / sub / "precious").write_text(name)
        if marker is not None:
            (tmp_path / name / ".moetune").write_bytes(marker)
    (tmp_path / ".moetune-export-link").symlink_to(tmp_path / "new")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write(tmp_path / "out", "first")
    for refused in ("occupied", "new"):
        (tmp_path / refused).mkdir(exist_ok=True)
        (tmp_path / refused / "file").touch()
        with pytest.raises(UserError, match=r"is not empty|no export wrote"):
            write(tmp_path / refused, "second", overwrite)
    write(tmp_path / "out", "second", overwrite=True)
    assert {path: path.read_bytes() for path in before} == before


def test_the_folder_of_an_export_that_runs_stays(tmp_path: Path) -> None:
    """Of two exports to one folder the first that is done has it."""
    with pytest.raises(UserError, match="is not empty"):  # noqa: PT012, SIM117
        with new_folder(tmp_path / "out", overwrite=False) as slow:
            (slow / "text").write_text("slow")
            write(tmp_path / "out", "fast")
            assert (slow / "text").read_text() == "slow"
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "text").read_text() == "fast"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_that_the_umask_says(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        with new_folder(tmp_path / "out", overwrite=False) as folder:
            save_file({"a": torch.zeros(1)}, folder / "a.safetensors")
            write_export_manifest(folder, {"format": "delta"})
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "first")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == "new":
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


@pytest.mark.parametrize("name", ["notes.txt", "sub/mine.bin", ".hidden", "adapter_model.bin"])
def test_a_file_of_ones_own_in_an_export_is_not_replaced_with_it(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "first")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    with pytest.raises(UserError, match=rf"{Path(name).name}' is not part of the export there; move it away"):
        write(out, "second", overwrite=True)
    assert ((out / name).read_text(), (out / "text").read_text()) == ("mine", "first")


@pytest.mark.parametrize("said", ['{"format": "delta"}', None])
def test_what_only_looks_like_an_export_is_not_replaced(said: str | None, tmp_path: Path) -> None:
    """A manifest of that name, or an adapter that another program trained."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ("manifest.json" if said else "adapter_config.json")).write_text(said or "{}")
    with pytest.raises(UserError, match=r"no \.moetune; choose another"):
        write(tmp_path / "out", "second", overwrite=True)
    assert len(names(tmp_path / "out")) == 1
