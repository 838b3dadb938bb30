"""What is logged of routing by layer, and what is said of experts without tokens and of routers that collapse."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from moetune.adapt.count import count_trainable
from moetune.run.resolve import resolve
from moetune.training.routing import RoutingWarnings, load_by_layer, load_summary
from tests import small
from tests.resolved import build, train

NOTHING: Any = cast(Any, None)


def test_a_layer_in_numbers() -> None:
    load = {2: torch.tensor([30.0, 10.0, 0.0, 0.0]), 5: torch.tensor([10.0, 10.0, 10.0, 10.0])}
    assert load_summary(load) == {"max_over_mean": 3.0, "layer": 2, "unused": 2}
    entropy = round(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), 4)
    assert load_by_layer(load) == {
        "2": {"tokens": [30, 10, 0, 0], "entropy": entropy, "max_over_mean": 3.0},
        "5": {"tokens": [10, 10, 10, 10], "entropy": round(math.log(4), 4), "max_over_mean": 1.0},
    }


def test_metrics_have_each_layer(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    config = small.run_config(small_model, small_data, tmp_path / "run")
    train(config)
    for line in small.read_metrics(tmp_path / "run"):
        assert list(line["routing"]) == ["0", "1"]
        sums = {sum(layer["tokens"]) for layer in line["routing"].values()}
        assert len(sums) == 1
        imbalance = max(layer["max_over_mean"] for layer in line["routing"].values())
        assert imbalance == line["expert_load"]["max_over_mean"]


@pytest.fixture
def watched(small_model: Path) -> tuple[RoutingWarnings, io.StringIO, int]:
    """Experts 0 and 2 train whole in both layers, with the router of layer 1."""
    config = small.run_config(small_model, Path("unused"), Path("unused"), "experts")
    run = resolve(config, "cpu")
    total = count_trainable(build(config, "meta"))["total"]
    said = io.StringIO()
    return RoutingWarnings(run, total, Console(file=said)), said, total


def look(warnings: RoutingWarnings, **load: list[int]) -> None:
    warnings.load.update({int(name[1:]): torch.tensor(tokens, dtype=torch.float) for name, tokens in load.items()})
    warnings.on_log(NOTHING, NOTHING, NOTHING)


def test_experts_without_tokens_are_named_once(watched: tuple[RoutingWarnings, io.StringIO, int]) -> None:
    warnings, said, total = watched
    look(warnings, _0=[10, 10, 0, 0], _1=[5, 5, 5, 5])
    assert said.getvalue() == ""  # too early to tell
    look(warnings, _0=[100, 100, 0, 0], _1=[50, 50, 50, 50])
    each = warnings.run.anatomy.moe_layers[0].shape.parameters_per_expert
    expected = (
        f"1 experts train and have received no token (layer:expert 0:2): {100 * each / total:.1f} % of what trains"
    )
    assert expected in said.getvalue()
    look(warnings, _0=[200, 200, 0, 0], _1=[100, 100, 100, 100])
    assert said.getvalue().count("received no token") == 1


def test_a_collapse_is_said_of_its_layer(watched: tuple[RoutingWarnings, io.StringIO, int]) -> None:
    warnings, said, _ = watched
    look(warnings, _0=[60, 40, 60, 40], _1=[60, 40, 60, 40])
    assert "collapsed" not in said.getvalue()
    look(warnings, _0=[160, 41, 160, 41], _1=[100, 90, 110, 90])
    assert said.getvalue().count("collapsed") == 1
    assert "routing of layer 0 has collapsed: of 4 experts 2.1 are in use" in said.getvalue()
