"""Reading a run folder: metrics, the newest checkpoint, and what is damaged."""

import json
import os
from pathlib import Path

import pytest

from moetune.config.load import load_run_config
from moetune.errors import UserError
from moetune.training.folder.run_folder import RunFolder
from tests.training.folder.test_run_writer import INPUTS, config, started


def test_a_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder(Path("~/run")).path == tmp_path / "run"


def test_auto_takes_the_newest_checkpoint_by_number(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=11)
    os.utime(folder.checkpoints_path / "step-2")  # a copy has other times
    assert folder.check(config(), "auto", overwrite=False) == folder.checkpoints_path / "step-11"


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=3)
    folder.append_metrics({"step": 4, "loss": 0.25})
    folder.metrics_file.write_bytes(folder.metrics_file.read_bytes()[:-9])
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3]
    folder.create(config(), folder.checkpoints_path / "step-3", False, None, INPUTS)
    folder.append_metrics({"step": 4})
    assert [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b"\xff", b'{"step": 1, "loss": 2.0}\n'])
def test_metrics_that_were_changed_are_refused(tmp_path: Path, damage: bytes) -> None:
    folder = started(tmp_path / "run", steps=3)
    whole = folder.metrics_file.read_bytes()
    folder.metrics_file.write_bytes(damage + whole[len(damage) + 1 :])
    for read in (folder.metrics, lambda: folder.check(config(), "auto", overwrite=False)):
        with pytest.raises(UserError, match=r"metrics\.jsonl"):
            read()
    folder.metrics_file.write_bytes(whole.replace(b"0.5", b"0.4"))
    with pytest.raises(UserError, match=r"changed after step-3 was written; restore it, or move it away"):
        folder.check(config(), "auto", overwrite=False)
    assert folder.check(config(), str(folder.checkpoints_path / "step-1"), overwrite=False) is not None


def test_a_run_goes_on_without_metrics_that_were_moved_away(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=3)
    folder.metrics_file.unlink()
    assert folder.metrics() == []
    for step in (4, 5):
        checkpoint = folder.check(config(), "auto", overwrite=False)
        folder.create(config(), checkpoint, False, None, INPUTS)
        folder.append_metrics({"step": step})
        assert [line["step"] for line in folder.metrics()] == list(range(4, step + 1))
        with folder.new_checkpoint(step, keep=9):
            pass
    folder.create(config(), folder.checkpoints_path / "step-2", False, None, INPUTS)
    assert folder.metrics_file.read_bytes() == b""


def test_checkpoints_do_not_grow_with_the_metrics(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=1)
    folder.append_metrics({"step": 2, "routing": "x" * 10**6})
    with folder.new_checkpoint(2, keep=2):
        pass
    assert sum(file.stat().st_size for file in folder.checkpoints_path.rglob("*") if file.is_file()) < 50_000


@pytest.mark.full
def test_a_flipped_byte_of_the_run_file_is_named_or_changes_nothing(tmp_path: Path) -> None:
    """Nothing but what may change on resume, and where the base is, can differ from what trained."""
    folder = started(tmp_path / "run", steps=1)
    file = folder.path / "run.yaml"
    whole = file.read_bytes()
    named, refused, same = 0, 0, 0
    for place in range(0, len(whole), 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            folder.newest_whole()
            found = load_run_config(file)
        except UserError as error:
            named += "run.yaml" in str(error)
            refused += 1
            continue
        for part in ("adapt", "optimizer", "data"):
            assert getattr(found, part) == getattr(config(), part), place
        free = {"path": "tiny-mixtral", "weights": "pretrained"}
        assert found.model.model_copy(update=free) == config().model, place
        same += 1
    assert named == refused
    assert same < refused


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=3)
    for checkpoint in folder.checkpoints():
        (checkpoint / "weights").write_text("x")
    with pytest.raises(UserError, match=r"no checkpoint .* is undamaged:(\n.*weights was changed.*){3}"):
        folder.newest_whole()
    assert len(folder.damaged) == 3
