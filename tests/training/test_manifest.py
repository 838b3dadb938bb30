"""Checkpoints are sealed: damage is named, never used, and a full disk costs nothing that was complete."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetune.errors import UserError
from moetune.training.manifest import damage, write_manifest
from moetune.training.run_folder import RunFolder
from moetune.training.run_writer import RunWriter
from tests import small
from tests.resolved import train

Run = Callable[..., Any]
OPTIMIZER_STATES = "optimizer/shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_model: Path, small_data: Path) -> Path:
    """A run of six steps with checkpoints after the second, fourth and sixth."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = {"steps": 6, "save_every": 2, "keep_checkpoints": 3}
    train(small.run_config(small_model, small_data, folder, "router", train=settings))
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    for file in run.rglob("*"):
        target = tmp_path / "run" / file.relative_to(run)
        if file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return tmp_path / "run"


def files(checkpoint: Path) -> list[str]:
    return sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flip": flip,
    "truncate": lambda file: os.truncate(file, file.stat().st_size - 1),
    "delete": lambda file: file.unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_of_any_file_is_named_and_the_checkpoint_before_is_used(copy: Path, how: str) -> None:
    newest = copy / "checkpoints" / "step-6"
    assert RunFolder(copy).newest_whole() == newest
    names = files(newest)
    assert {"trained.safetensors", "optimizer.json", "generators/0.safetensors", "manifest.json"} <= set(names)
    assert OPTIMIZER_STATES in names
    for name in names:
        whole = (newest / name).read_bytes()
        DAMAGE[how](newest / name)
        folder = RunFolder(copy)
        found = folder.newest_whole()
        (newest / name).write_bytes(whole)
        assert found == copy / "checkpoints" / "step-4", name
        (said,) = folder.damaged
        assert name in said


def test_a_file_that_does_not_belong_is_named(copy: Path) -> None:
    (copy / "checkpoints" / "step-6" / "pytorch_model.bin").write_bytes(b"\x80")
    assert damage(copy / "checkpoints" / "step-6") == "pytorch_model.bin does not belong there; remove it"


def test_a_file_that_does_not_belong_in_a_folder_is_named(copy: Path) -> None:
    (copy / "checkpoints" / "step-6" / "optimizer" / "more.safetensors").write_bytes(b"\x80")
    there = damage(copy / "checkpoints" / "step-6")
    assert there == "optimizer/more.safetensors does not belong there; remove it"


def test_what_a_file_manager_leaves_is_no_damage(copy: Path) -> None:
    (copy / "checkpoints" / "step-6" / ".DS_Store").write_bytes(b"\x00")
    assert damage(copy / "checkpoints" / "step-6") is None


def test_a_run_without_a_whole_checkpoint_is_refused(copy: Path) -> None:
    for step in (2, 4, 6):
        flip(copy / "checkpoints" / f"step-{step}" / "trained.safetensors")
    with pytest.raises(UserError, match=r"no checkpoint .* is whole:(\n.*trained.safetensors was changed.*){3}"):
        RunFolder(copy).newest_whole()


def test_resuming_says_what_it_skips_and_ends_as_if_nothing_had_happened(
    copy: Path, run: Path, small_model: Path, small_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(copy / "checkpoints" / "step-6" / OPTIMIZER_STATES)
    settings = {"steps": 6, "save_every": 2, "keep_checkpoints": 3}
    result = train(small.run_config(small_model, small_data, copy, "router", train=settings), resume="auto")
    assert result.steps == 6
    assert "skipping damaged" in (said := capsys.readouterr().err)
    assert f"{OPTIMIZER_STATES} was changed after it was written" in said.replace("\n", "")
    name = "checkpoints/step-6/trained.safetensors"
    assert (copy / name).read_bytes() == (run / name).read_bytes()
    loads = [json.loads((folder / "memory.json").read_text())["expert_load"] for folder in (copy, run)]
    assert loads[0] == loads[1]
    assert any(sum(tokens) for tokens in loads[0].values())


def test_a_full_disk_leaves_the_last_checkpoint_whole(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunWriter(copy)
    before = {file: file.read_bytes() for file in (copy / "checkpoints").rglob("*") if file.is_file()}
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(100))

    def fills_up() -> None:
        with folder.new_checkpoint(8, 3, 5000) as aside:
            (aside / "trained.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"needs 5,000 bytes and 100 are free. The last complete one is step-6"):
        fills_up()
    assert {file: file.read_bytes() for file in (copy / "checkpoints").rglob("*") if file.is_file()} == before


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_a_disk_too_small_is_refused_before_the_run(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(100))
    with pytest.raises(UserError, match=r"checkpoints need [\d,]+ bytes there and 100 are free"):
        train(small.run_config(small_model, small_data, tmp_path / "run", "router"))
    assert not (tmp_path / "run").exists()


def test_a_seal_covers_every_byte(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "a").write_bytes(b"abc")
    write_manifest(folder, 1)
    assert damage(folder) is None
    (folder / "a").write_bytes(b"abd")
    assert damage(folder) == "a was changed after it was written"


def test_a_seal_covers_the_files_of_folders(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a").write_bytes(b"abc")
    write_manifest(folder, 1)
    assert damage(folder) is None
    (folder / "inner" / "a").write_bytes(b"abd")
    assert damage(folder) == "inner/a was changed after it was written"
    (folder / "inner" / "a").unlink()
    assert damage(folder) == "inner/a is missing"


def test_a_checkpoint_is_of_the_step_that_its_name_says(tmp_path: Path) -> None:
    folder = tmp_path / "step-8"
    folder.mkdir()
    write_manifest(folder, 4)
    assert damage(folder) == "it is of step 4, and its name says otherwise"
