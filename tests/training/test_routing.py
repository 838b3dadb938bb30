"""What is logged of routing by layer, and what is said of experts without tokens and of routers that collapse."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from moetune.adapt.count import count_trainable
from moetune.training.metrics import load_by_layer, load_summary
from moetune.training.run_warnings import RunWarnings
from tests import small
from tests.resolved import build, train


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
def watched(small_model: Path) -> tuple[RunWarnings, io.StringIO]:
    """Experts 0 and 2 train whole in both layers, with the router of layer 1."""
    adapted = build(small.run_config(small_model, Path("unused"), Path("unused"), "experts"), "cpu")
    said = io.StringIO()
    return RunWarnings(adapted, count_trainable(adapted)["total"], Console(file=said, width=1000)), said


def layers(*load: list[int]) -> dict[int, Tensor]:
    return {layer: torch.tensor(tokens, dtype=torch.float) for layer, tokens in enumerate(load)}


def test_experts_without_tokens_are_named_once(watched: tuple[RunWarnings, io.StringIO]) -> None:
    notices, said = watched
    line = notices.about_step(1.0, True, {}, layers([10, 10, 0, 0], [5, 5, 5, 5]))
    assert line["idle_experts"] == 1
    assert "no token has reached" not in said.getvalue()  # too early to tell
    notices.about_step(1.0, True, {}, layers([100, 100, 0, 0], [50, 50, 50, 50]))
    each = notices.adapted.structure.moe_layers[0].shape.parameters_per_expert
    share = f"{100 * each / notices.trained:.1f} % of what trains"
    assert f"no token has reached 1 expert to be trained (layer:expert 0:2): {share}" in said.getvalue()
    notices.at_end(layers([200, 200, 0, 0], [100, 100, 100, 100]))
    assert said.getvalue().count("no token has reached") == 1


def test_a_collapse_is_said_of_its_layer(watched: tuple[RunWarnings, io.StringIO]) -> None:
    notices, said = watched
    for load in ([[60, 40, 60, 40], [60, 40, 60, 40]], [[100, 1, 100, 1], [40, 50, 50, 50]]):
        assert "collapsed" not in said.getvalue()
        line = notices.about_step(1.0, False, layers(*load), {})
    assert said.getvalue().count("collapsed") == 1
    assert "routing of layer 0 has collapsed: of 4 experts 2.1 are in use" in said.getvalue()
    assert line["notices"] == ["collapsed routers"]
