"""Every run leaves predicted beside measured, and says so where they are far apart."""

import json
from pathlib import Path

import pytest

from moetune.watch import memory_record
from tests import small
from tests.resolved import train


def test_a_prediction_that_is_far_off_is_said(
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small.run_config(small_model, small_data, tmp_path / "run", "router")
    train(config, predicts=True)
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    measured = record["measured"]["peak_allocated"]
    assert (record["schema"], record["device"], record["steps"]) == (1, "cpu", 2)
    assert measured > 10_000
    for predicted, says in ((1, True), (int(1.04 * measured), False), (int(1.06 * measured), True)):
        monkeypatch.setattr(memory_record, "predicted", lambda *_, peak=predicted: memory_record.Predicted(peak))
        capsys.readouterr()
        train(config, overwrite=True, predicts=True)
        assert ("memory: predicted" in capsys.readouterr().err) is says
        record = json.loads((tmp_path / "run" / "memory.json").read_text())
        assert record["predicted"]["peak_allocated"] == predicted
