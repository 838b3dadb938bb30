"""A traced report is read from disk when the same is asked again."""

from pathlib import Path
from typing import Any

import pytest

from moetune.cache import cache_folder
from moetune.config.schema import RunConfig
from moetune.memory import predict as predict_module
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.planning.predict import predict as predict_run
from moetune.planning.predictor import Predictor
from moetune.run.resolve import ResolvedRun


def test_a_run_is_traced_once(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    traced: list[Any] = []
    memory_of = predict_module.rank_memory
    monkeypatch.setattr(
        predict_module, "rank_memory", lambda *given, **more: traced.append(given) or memory_of(*given, **more)
    )

    def run(length: int) -> RunConfig:
        raw = {"model": {"path": str(small_model)}, "adapt": {"router": "all"}, "hardware": {"gpu": "l40s"}}
        return RunConfig.model_validate({**raw, "train": {"sequence_length": length}})

    first = Predictor().report(run(64))
    assert first.time is not None
    assert Predictor().report(run(64)) == first
    assert len(traced) == 2  # for the assumed routing, and for the most uneven one
    assert Predictor().report(run(128)) != first
    assert Predictor(gpu="h100").report(run(64)).gpu != first.gpu
    assert len(traced) == 6
    for file in cache_folder("reports").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert Predictor().report(run(64)) == first
    assert len(traced) == 8
    quick = Predictor().quick(run(64))  # without the allocator, on which no verdict depends
    assert quick != first
    assert (quick.span, quick.verdict, quick.fullest.parts) == (first.span, first.verdict, first.fullest.parts)
    again = [predict_run(run(64)), len(traced), predict_run(run(64)), len(traced)]
    assert again[:2] == again[2:]
    assert predict_run(run(64), allocator="default") != again[0]


def test_a_run_is_traced_again_once_a_kernel_has_failed(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    raw = {"model": {"path": str(small_model)}, "adapt": {"router": "all"}, "train": {"sequence_length": 64}}
    run = RunConfig.model_validate(raw)
    assert not Predictor("l40s").report(run).notes

    def as_known(one: ResolvedRun, card: Gpu | None) -> ResolvedRun:
        assert card == find_gpu("l40s")
        return one.but(hardware={"without_kernels": ("gather_rows",)})

    monkeypatch.setattr(predict_module, "as_known", as_known)
    for _ in range(2):
        assert "gather_rows" in Predictor("l40s").report(run).notes[0]
