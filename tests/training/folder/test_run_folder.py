"""Reading a run folder: metrics, the newest checkpoint, and what is damaged."""

import json
import os
from pathlib import Path

import pytest

from moetune.config.load import load_run_config
from moetune.errors import UserError
from moetune.training.folder.run_folder import RunFolder
from tests.training.folder.test_run_writer import config, started


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
    folder.create(config(), folder.checkpoints_path / "step-3", overwrite=False)
    folder.append_metrics({"step": 4})
    assert [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b"", b"\xff", b'{"step": 1, "loss": 2.0}\n'])
def test_metrics_that_were_damaged_are_those_of_the_checkpoint(tmp_path: Path, damage: bytes) -> None:
    folder = started(tmp_path / "run", steps=3)
    whole, lines = folder.metrics_file.read_bytes(), folder.metrics()
    folder.metrics_file.write_bytes(damage + whole[len(damage) + 1 :])
    assert folder.metrics() == lines
    folder.create(config(), folder.checkpoints_path / "step-3", overwrite=False)
    assert folder.metrics_file.read_bytes() == whole


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
