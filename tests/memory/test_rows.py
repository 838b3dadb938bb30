"""Rows of gate_up take what memory is left, and never so much that a run no longer fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.memory.closed_form.depth import Depths
from moetune.memory.predict import predict
from moetune.memory.report import GpuMemory, LoadPeaks, MemoryReport, Parts
from moetune.memory.rows import rows_of, settled
from moetune.planning.predictor import Predictor
from moetune.report.memory import rows as sentence
from moetune.run.resolve import ResolvedRun, resolve
from tests.memory.models import toy_run, write_toy
from tests.report.sample import GIB, MIB, rank, sample

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
LAYERS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ResolvedRun:
    toy = write_toy(tmp_path_factory.mktemp("toy"), "mixtral", experts=2, num_hidden_layers=LAYERS)
    train = {"sequence_length": 1024, "micro_batch": 4, "keep_rows": "auto"}
    return resolve(toy_run(toy, "mixtral", LORA, train=train, model={"dtype": "bf16", "base": "bf16"}), "cuda")


@pytest.mark.parametrize("spare", [0, 1, 3, 100])
@pytest.mark.parametrize("gain", [0, 1.7])
def test_as_many_layers_as_leave_the_margin(run: ResolvedRun, spare: int, gain: float) -> None:
    """`gain`: what the first layer that keeps its rows needs less in backward, in layers."""
    each = rows_of(run).bytes
    size = int((8 * GIB + spare * each) * 1.02) + MIB

    def predicted(one: ResolvedRun) -> MemoryReport:
        kept = rows_of(one).kept
        alive = 8 * GIB + max(0, int((kept - gain) * each))
        return sample(
            gpu=GpuMemory("card", size), ranks=(rank(0, Parts(alive)),), load=LoadPeaks(0, 0), rows=rows_of(one)
        )

    none = predicted(run.keeping_rows(0))
    tight = replace(none, gpu=GpuMemory("card", none.required))
    assert (tight.verdict, tight.rows_that_fit) == ("tight", 0)
    found = settled(run, predicted)
    assert predicted(found).verdict == none.verdict
    kept = rows_of(found).kept
    assert found.config.train.keep_rows == (kept or "none")
    assert kept == LAYERS or predicted(run.keeping_rows(kept + 1)).verdict != "yes"
    assert settled(found, lambda _: pytest.fail("is settled")) is found


@pytest.mark.full
def test_a_prediction_for_a_card_settles_it(run: ResolvedRun) -> None:
    depths = Depths()

    def at(keep_rows: Any, gpu: str | None) -> MemoryReport:
        config = run.config.but(train={"keep_rows": keep_rows})
        return predict(resolve(config, "cuda", like=run), method="formula", gpu=gpu, depths=depths)

    none, some = at("none", "24GiB"), at(6, "24GiB")
    assert none.rows_that_fit == LAYERS
    assert f"train.keep_rows={LAYERS}" in sentence(none)
    assert "rows of 6 of 12 layers kept" in dict(some.about)["batch"]
    size = some.span.high + some.rows.bytes // 8
    found = at("auto", f"{size}B")
    assert (found.verdict, found.rows.kept, found.required) == ("yes", 6, some.required)
    assert not sentence(found)
    assert found.to_json()["keep_rows"] == {"layers": LAYERS, "kept": 6, "bytes": none.rows.bytes, "fit": 6}
    assert at("auto", f"{none.required}B").rows.kept == 0
    assert not at("auto", f"{none.span.low - 1}B").fits
    assert at("auto", None).required == at("none", None).required
    searched = Predictor("24GiB", _depths=depths).of(run.config)  # plans compare what runs need at least
    assert searched.rows.kept == 0


def test_no_number_where_none_can_be_chosen(tmp_path: Path) -> None:
    dense = toy_run(write_toy(tmp_path, "llama"), "llama", {"also": ["norm"]}, train={"keep_rows": "auto"})
    report = predict(dense, method="formula", gpu="24GiB")
    assert (report.rows, report.rows_that_fit, report.to_json()["keep_rows"]) == (None, None, None)
