"""The benchmark of optimizers at toy size: it runs, its JSON has the published keys, its bytes add up. No time is
asserted."""

import json
from types import ModuleType
from typing import Any, get_args

import pytest

from moetune.config.schema import OptimizerName

pytestmark = pytest.mark.full
BENCH = "optimizers"
HIDDEN, INTERMEDIATE, LAYERS, EXPERTS = 64, 96, 1, 4
MATRIX = 4 * 2 * INTERMEDIATE * HIDDEN  # bytes of one expert's gate and up projections
TRAINED = LAYERS * 2 * 3 * INTERMEDIATE * HIDDEN + LAYERS * EXPERTS * HIDDEN


@pytest.fixture(scope="module")
def report(bench: ModuleType) -> dict[str, Any]:
    sizes = bench.Sizes(HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, heads=4, kv_heads=2, vocabulary=64, tokens=16)
    return bench.run("cpu", sizes, repetitions=1)


def test_the_report_is_json_with_the_keys_that_are_published(bench: ModuleType, report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report)) == report
    assert {"schema", "versions", "device", "commit", "sizes", "dtype", "repetitions", "results"} < report.keys()
    assert report["parameters"]["trained"] == TRAINED
    names = [row["name"] for row in report["results"]]
    expected = [f"{name}{how}" for name in get_args(OptimizerName) for how in ("", " fused")]
    assert names == [*expected, "adamw fused norm", "lomo fused norm"]
    for row in report["results"]:
        assert tuple(row["bytes"]) == bench.BYTES
        assert row["bytes"]["steady"] + row["bytes"]["above"] == row["bytes"]["peak"]
        assert {len(seconds) for seconds in row["seconds"].values()} == {1}
    assert len(list(bench.table(report))) == 2 + len(names)


def test_gradients_are_one_matrix_or_all(report: dict[str, Any]) -> None:
    for row in report["results"]:
        assert row["bytes"]["masters"] == 0
        if row["fused"]:
            assert row["bytes"]["gradients"] == MATRIX, row["name"]
        else:
            assert row["bytes"]["gradients"] >= 4 * TRAINED, row["name"]


def test_what_stays_between_steps_is_weights_and_states(report: dict[str, Any]) -> None:
    of = {row["name"]: row["bytes"] for row in report["results"]}
    assert of["lomo"]["states"] == of["lomo fused"]["states"] == of["sgd"]["states"] == 0
    assert 0 <= of["adamw"]["states"] - 2 * 4 * TRAINED < 100  # two moments, and step counts
    for name, bytes_ in of.items():
        weights = bytes_["steady"] - bytes_["states"]
        assert weights == pytest.approx(of["lomo"]["steady"], abs=4096), name
