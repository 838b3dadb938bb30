"""Reading a run folder: metrics, the newest checkpoint, and what is damaged."""

import json
import os
from pathlib import Path

import pytest

from moetune.errors import UserError
from tests.training.folder.test_run_writer import INPUTS, config, started


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


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=3)
    for checkpoint in folder.checkpoints():
        (checkpoint / "weights").write_text("x")
    with pytest.raises(UserError, match=r"no checkpoint .* is undamaged:(\n.*weights was changed.*){3}"):
        folder.newest_whole()
    assert len(folder.damaged) == 3
