"""Expert load in the lines of metrics."""

import math
from pathlib import Path

import torch

from moetune.training.metrics import Interval, Pace, Sums, load_by_layer, load_summary
from moetune.training.step.stepper import Reduced
from tests import small
from tests.resolved import train


def test_a_layer_in_numbers() -> None:
    load = {2: torch.tensor([30.0, 10.0, 0.0, 0.0]), 5: torch.tensor([10.0, 10.0, 10.0, 10.0])}
    entropy = round(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), 4)
    by_layer = load_by_layer(load)
    assert by_layer == {
        "2": {"tokens": [30, 10, 0, 0], "entropy": entropy, "max_over_mean": 3.0},
        "5": {"tokens": [10, 10, 10, 10], "entropy": round(math.log(4), 4), "max_over_mean": 1.0},
    }
    assert load_summary(by_layer) == {"max_over_mean": 3.0, "layer": 2, "unused": 2}
    assert load_summary({}) == {}


def test_metrics_have_each_layer(configure: small.Configure, tmp_path: Path) -> None:
    config = configure()
    train(config)
    for line in small.read_metrics(tmp_path / "run"):
        assert list(line["routing"]) == ["0", "1"]
        sums = {sum(layer["tokens"]) for layer in line["routing"].values()}
        assert len(sums) == 1
        imbalance = max(layer["max_over_mean"] for layer in line["routing"].values())
        assert imbalance == line["expert_load"]["max_over_mean"]


def test_the_pace() -> None:
    metrics = Pace(flops=10**12, limit=10**13).metrics(updates=4, seconds=2.0, left=10)
    assert metrics == {"flops": 10**12, "share_of_limit": 0.2, "seconds_left": 5.0}
    assert Pace().metrics(updates=0, seconds=2.0, left=10) == dict.fromkeys(metrics)


def test_speed_counts_the_steps_since_an_evaluation() -> None:
    interval = Interval()
    reduced = Reduced(torch.tensor(1.0), torch.tensor(1.0), 1.0)
    for _ in range(3):
        interval.add(Sums(positions=8, tokens=8), reduced)
    interval.restart_clock()
    interval.add(Sums(positions=8, tokens=8), reduced)
    assert (interval.updates, interval.timed_updates, interval.sums.positions) == (4, 1, 8)
