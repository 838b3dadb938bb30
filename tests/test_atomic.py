"""Outputs are whole or not there, and what was there before is lost only to what replaces it."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import moetune.exporting.folder
from moetune.atomic import NEW, aside, new_folder, publish
from moetune.errors import UserError
from moetune.exporting.folder import write_export_manifest
from moetune.files import Ledger, refuse_in_checkpoint
from tests.processes import processes
from tests.training.test_resume import die_at


def write(out: Path, text: str, overwrite: bool = False) -> None:
    with new_folder(out, overwrite) as folder:
        write_export_manifest(folder, {"format": "delta"})
        (folder / "text").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


MOMENTS = {
    "before the lock": ("moetune.atomic.lock", 1),
    "before the lock says whose": ("json.dumps", 1),
    "half a record": ("os.fsync", 1),
    "before the new folder": ("pathlib.Path.mkdir", 2),
    "half written": ("moetune.exporting.folder.write_export_manifest", 1),
    "before the old one was moved away": ("moetune.atomic._write_record", 2),
    "between the two renames": ("pathlib.Path.rename", 4),
    "before the old one went": ("shutil.rmtree", 1),
    "before the record went": ("pathlib.Path.unlink", 5),
    "half cleared": ("pathlib.Path.rmdir", 1),
}


def killed(out: Path, function: str, call: int) -> None:
    """Writes and dies just before a call of a function."""
    die_at(function, call, "before")
    with new_folder(out, overwrite=True) as folder:
        moetune.exporting.folder.write_export_manifest(folder, {"format": "delta"})
        (folder / "text").write_text("second")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_loses_nothing_and_its_leftovers_go(moment: str, overwrite: bool, tmp_path: Path) -> None:
    """Also by a call that is refused."""
    write(tmp_path / "out", "first")
    process = processes.Process(target=killed, args=(tmp_path / "out", *MOMENTS[moment]))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert names(tmp_path)[0] == ".out.moetune"
    if overwrite:
        write(tmp_path / "out", "third", overwrite=True)
    else:
        with pytest.raises(UserError, match="is not empty"):  # whichever of the two it is, it is whole
            write(tmp_path / "out", "third")
    assert names(tmp_path) == ["out"]
    whole = "third" if overwrite else "second" if moment in list(MOMENTS)[-3:] else "first"
    assert (tmp_path / "out" / "text").read_text() == whole


FOREIGN = [".out-20240101", ".out.begun", ".out", "out.moetune", ".out.moetune.moetune", ".moetune-0", ".lock", "new"]
RECORDS = [None, b"", b"{}", b"[", b'"x"', json.dumps({"schema": 1, "written by moetune": "run"}).encode()]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("record", RECORDS)
def test_what_is_not_ours_stays(record: bytes | None, overwrite: bool, tmp_path: Path) -> None:
    """Whatever it is called and whatever it says, and also beside an output that is refused."""
    for name in (*FOREIGN, ".taken.moetune"):
        for sub in ("", "new", "old"):
            (tmp_path / name / sub).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / sub / "precious").write_text(name)
        if record is not None:
            (tmp_path / name / "of.json").write_bytes(record)
    (tmp_path / ".linked.moetune").symlink_to(tmp_path / "new")
    (tmp_path / ".file.moetune").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write(tmp_path / "out", "first")
    for refused in ("occupied", "new"):
        (tmp_path / refused).mkdir(exist_ok=True)
        (tmp_path / refused / "file").touch()
        with pytest.raises(UserError, match=r"is not empty|holds no export"):
            write(tmp_path / refused, "second", overwrite)
    for taken in ("taken", "linked", "file"):
        with pytest.raises(UserError, match=rf"\.{taken}\.moetune', in which .* is not moetune's; move it away"):
            write(tmp_path / taken, "second", overwrite)
    write(tmp_path / "out", "second", overwrite=True)
    assert {path: path.read_bytes() for path in before} == before


def test_an_output_has_one_writer(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out", overwrite=False) as slow:
        (slow / "text").write_text("slow")
        with pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on "):
            write(tmp_path / "out", "fast", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "text").read_text() == "slow"


def begin(out: Path, of: dict[str, Any] | None, text: str = "", **how: bool) -> str:
    """Interrupt a call after it has added `text` to its file of batches; return what it found there."""
    found = ""
    with suppress(KeyboardInterrupt), aside(out, of, **how) as folder:
        file = folder / "batches"
        found = file.read_text() if file.exists() else ""
        file.write_text(found + text)
        raise KeyboardInterrupt
    return found


def test_only_the_same_call_goes_on_with_what_was_interrupted(tmp_path: Path) -> None:
    out, of = tmp_path / "out", {"model": "a", "sizes": [1, 2]}
    begin(out, of)
    assert names(tmp_path) == []  # nothing had been done
    assert [begin(out, of, text) for text in ("first", ", second", "")] == ["", "first", "first, second"]
    for other in ({"model": "b", "sizes": [1, 2]}, None):
        with (
            pytest.raises(UserError, match=r"out\.moetune' holds what is done; .*remove that folder"),
            aside(out, other),
        ):
            pass
    assert begin(out, {"model": "b"}, "other", overwrite=True) == ""
    assert begin(out, {"model": "b"}) == "other"
    with aside(out, {"model": "b"}) as folder:
        (folder / NEW).write_text("whole")
        publish(out)
        assert names(folder) == [".lock", "batches", "of.json"]
    assert (names(tmp_path), out.read_text()) == (["out"], "whole")


def test_nothing_stays_of_a_call_whose_input_is_bad(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="the input is bad"), aside(out, {"model": "a"}) as folder:  # noqa: PT012
        (folder / "batches").write_text("first")
        raise UserError("the input is bad")
    assert names(tmp_path) == []


@pytest.mark.parametrize("out", ["", ".", "..", "/", "../here"])
def test_the_working_directory_is_no_output(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="folder that moetune runs in; give another"):
            write(Path(out), "mine", overwrite=overwrite)
    assert names(tmp_path) == ["here"]
    assert names(tmp_path / "here") == []


@pytest.mark.parametrize("way", ["checkpoints/step-1", "checkpoints/step-1/deep/er", "checkpoints", "link/in"])
def test_nothing_is_written_into_a_checkpoint(way: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "link").symlink_to(run / "checkpoints" / "step-1")
    refuse_in_checkpoint(run / way / "x")  # of another program's
    Ledger(run).add("run", "run.yaml")
    with pytest.raises(UserError, match="x' is among the checkpoints of a run"):
        write(run / way / "x", "mine")
    assert names(run / "checkpoints" / "step-1") == []
    refuse_in_checkpoint(run / "x")


def test_a_mount_point_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(UserError, match="give a folder in it"):
        write(tmp_path / "out", "mine")


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
    with pytest.raises(UserError, match=r"--out '.*out' was not written: Input/output error"):
        write(tmp_path / "out", "second", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "text").read_text() == "first"


def test_the_file_that_failed_is_named(tmp_path: Path) -> None:
    named = r"--out '.*out' was not written: x \(base/model\.safetensors\)"
    with pytest.raises(UserError, match=named), new_folder(tmp_path / "out", overwrite=False):
        raise OSError(2, "x", "base/model.safetensors")
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
