"""Every run leaves predicted beside measured, and says so where they are far apart."""

import json
from pathlib import Path

import pytest

from moetune.training import memory_record
from tests import small
from tests.resolved import train


@pytest.mark.parametrize("predicted", [1, 10**12])
def test_a_prediction_that_is_far_off_is_said(
    predicted: int,
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory_record, "predicted_peak", lambda *_: predicted)
    train(small.run_config(small_model, small_data, tmp_path / "run", "router"), predicts=True)
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert (record["schema"], record["device"], record["steps"]) == (1, "cpu", 2)
    assert record["predicted"]["peak_allocated"] == predicted
    assert record["measured"]["peak_allocated"] > 10_000
    assert "memory: predicted" in capsys.readouterr().err


def test_one_that_is_near_is_only_recorded(
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small.run_config(small_model, small_data, tmp_path / "run", "router")
    train(config, predicts=True)
    measured = json.loads((tmp_path / "run" / "memory.json").read_text())["measured"]["peak_allocated"]
    capsys.readouterr()
    for factor, says in ((1.04, False), (1.06, True)):
        monkeypatch.setattr(memory_record, "predicted_peak", lambda *_, factor=factor: int(measured * factor))
        train(config, overwrite=True, predicts=True)
        assert ("memory: predicted" in capsys.readouterr().err) is says
