"""The benchmark of a CPU step at toy size: moetune and PEFT agree, its JSON has its keys. No time is asserted."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCH = "step_cpu"


@pytest.fixture(scope="module")
def sizes(bench: ModuleType) -> Any:
    return bench.Sizes(
        hidden=32,
        intermediate=48,
        layers=2,
        experts=4,
        heads=4,
        kv_heads=2,
        vocabulary=64,
        rank=3,
        tokens=24,
    )


@pytest.fixture(scope="module")
def report(bench: ModuleType, sizes: Any) -> dict[str, Any]:
    return bench.run({"toy": sizes}, repetitions=2, warm_up=1)


def test_the_report_is_json_with_the_keys_that_are_published(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report)) == report
    assert {"schema", "versions", "device", "commit", "repetitions", "shapes"} < report.keys()
    assert {"python", "moetune", "torch", "transformers", "peft"} == report["versions"].keys()
    toy = report["shapes"]["toy"]
    assert toy.keys() == {"sizes", "checkpointing"}
    assert toy["checkpointing"].keys() == {"none", "full"}
    for result in toy["checkpointing"].values():
        assert result.keys() == {"agreement", "parameters", "seconds", "bytes", "ratios"}
        assert result["ratios"].keys() == {"speed", "cpu_time", "peak", "above"}
        for side in ("moetune", "peft"):
            assert len(result["seconds"][side]["all"]) == 2
            memory = result["bytes"][side]
            assert memory["before"] + memory["above"] == memory["peak"] > memory["before"]


def test_both_sides_compute_the_same_loss_and_gradients(report: dict[str, Any]) -> None:
    for result in report["shapes"]["toy"]["checkpointing"].values():
        agreement = result["agreement"]
        assert max(agreement["loss"], agreement["worst_gradient"]) <= agreement["tolerance"] == 1e-5


def test_both_sides_hold_the_same_tensors_between_steps(report: dict[str, Any], sizes: Any) -> None:
    gate_up = sizes.rank * (sizes.hidden + 2 * sizes.intermediate)
    down = sizes.rank * (sizes.intermediate + sizes.hidden)
    for result in report["shapes"]["toy"]["checkpointing"].values():
        assert result["parameters"]["trained"] == sizes.layers * sizes.experts * (gate_up + down)
        before = {side: result["bytes"][side]["before"] for side in ("moetune", "peft")}
        # weights, and Adam's two moments of what trains; the optimizers keep a step count for each tensor besides
        least = 4 * (result["parameters"]["total"] + 2 * result["parameters"]["trained"])
        assert all(least <= bytes_ < least + 4096 for bytes_ in before.values())


def test_factors_that_differ_are_refused(bench: ModuleType, sizes: Any, tmp_path: Path) -> None:
    bench.save_model(sizes, tmp_path)
    batch = bench.make_batch(sizes)
    moetune = bench.moetune_side(tmp_path, sizes, batch, "none")
    peft = bench.peft_side(tmp_path, sizes, batch, "none")
    bench.copy_factors(moetune, peft, sizes)
    with torch.no_grad():
        next(p for p in peft.module.parameters() if p.requires_grad).mul_(1.01)
    with pytest.raises(SystemExit, match="disagree"):
        bench.compare(moetune, peft)


def test_a_storage_counts_once_and_until_it_is_freed(bench: ModuleType) -> None:
    known = torch.zeros(100)
    with bench.LiveStorages([known, known[:50]]) as live:
        assert live.current == 400
        view = known.view(10, 10)
        made = torch.ones(25)
        assert live.current == 500
        temporary = made.repeat(4)
        del temporary, made
        assert (live.current, live.peak) == (400, 900)
        del view
        assert live.current == 400
