"""A traced report, and what a search found, are read from disk when the same is asked again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.cache import cache_folder
from moetune.config.schema import RunConfig
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.planning import predictor
from moetune.planning.candidate import Candidate, worth
from moetune.planning.predictor import Predictor
from moetune.planning.search import Search
from moetune.planning.strategies import Strategy, strategies
from moetune.run.resolve import ResolvedRun


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
    for file in cache_folder("closed_form").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert Predictor().traced(run(64)) == first
    assert len(traced) == 4


def test_a_run_is_traced_again_once_a_kernel_has_failed(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    raw = {"model": {"path": str(small_model)}, "adapt": {"router": "all"}, "train": {"sequence_length": 64}}
    run = RunConfig.model_validate(raw)
    assert not Predictor("l40s").traced(run).notes

    def as_known(one: ResolvedRun, card: Gpu | None) -> ResolvedRun:
        assert card == find_gpu("l40s")
        return replace(one, config=one.config.but(hardware={"without_kernels": ("gather_rows",)}))

    for module in ("moetune.planning.kept", "moetune.memory.predict"):
        monkeypatch.setattr(f"{module}.as_known", as_known)
    for _ in range(2):
        assert "gather_rows" in Predictor("l40s").traced(run).notes[0]


def test_a_strategy_is_searched_once(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    largest, searched = Search.largest, []

    def counted(search: Search, strategy: Strategy, more_than: int = 0) -> Candidate | None:
        searched.append(more_than)
        return largest(search, strategy, more_than)

    monkeypatch.setattr(Search, "largest", counted)

    def search(length: int = 64, **options: bool) -> Search:
        raw = {"model": {"path": str(small_model)}, "adapt": {}, "hardware": {"gpu": "24GiB"}}
        return Search.of(RunConfig.model_validate({**raw, "train": {"sequence_length": length}}), **options)

    strategy = next(strategies("experts", search().structure, 1))
    first = search().found(strategy)
    assert first is not None
    again = search().found(strategy)
    assert again == first
    assert again.config.model_fields_set == first.config.model_fields_set
    assert again.to_json() == first.to_json()
    few, many = 0, first.amount
    while worth(few + 1) < many:
        few += 1
    assert search().found(strategy, few) == first
    assert search().found(strategy, many) is None  # no search: what is known trains no more than these
    assert searched == [0]
    search(128).found(strategy)
    search(tight=True).found(strategy)
    assert searched == [0, 0, 0]


def test_nothing_found_is_known_for_more_experts_only(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    asked: list[int] = []
    monkeypatch.setattr(Search, "largest", lambda search, strategy, more_than: asked.append(more_than))
    raw = {"model": {"path": str(small_model)}, "adapt": {}, "hardware": {"gpu": "24GiB"}}
    search = Search.of(RunConfig.model_validate(raw))
    strategy = next(strategies("experts", search.structure, 1))
    for more_than in (5, 5, 7, 3, 4):
        assert search.found(strategy, more_than) is None
    assert asked == [5, 3]
