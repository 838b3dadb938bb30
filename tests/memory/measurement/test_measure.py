"""What is measured of real steps is of the steps alone."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetune.memory.measurement import measure as measuring
from moetune.training.step import stepper
from tests import small
from tests.resolved import measure


def test_an_evaluation_is_no_part_of_the_speed(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that is one second later whenever it is read."""
    seconds = count()

    def evaluate(*_: Any) -> None:
        for _ in range(9):
            next(seconds)

    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(stepper, "held_out_loss", evaluate)
    train = {"eval_micro_batch": 4, "micro_batch": 2, "accumulate": 1, "sequence_length": 64}
    config = small.run_config(small_model, small_data, tmp_path, train=train, data={"eval": str(small_data)})
    for number in (1, 2, 3):
        seconds = count()
        found = measure(config, "cpu", number).tokens_per_second
        assert found == 2 * 64, number
