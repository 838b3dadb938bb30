"""A report by trace is read from disk where the same run was traced before."""

from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.closed_form import store
from moetune.planning import predictor
from moetune.planning.predictor import Predictor


def test_a_run_is_traced_once(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    traced: list[Any] = []
    predict = predictor.predict
    monkeypatch.setattr(predictor, "predict", lambda *run, **options: traced.append(run) or predict(*run, **options))

    def run(length: int) -> RunConfig:
        raw = {"model": {"path": str(small_model)}, "adapt": {"router": "all"}, "hardware": {"gpu": "l40s"}}
        return RunConfig.model_validate({**raw, "train": {"sequence_length": length}})

    first = Predictor().traced(run(64))
    assert first.time is not None
    assert Predictor().traced(run(64)) == first
    assert len(traced) == 1
    assert Predictor().traced(run(128)) != first
    assert Predictor(gpu="h100").traced(run(64)).gpu != first.gpu
    assert len(traced) == 3
    for file in store.folder().iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert Predictor().traced(run(64)) == first
    assert len(traced) == 4
