"""What a step asks of the device: launches, waits of the host, copies. Upper bounds; lower them when they fall."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moetune.config import RunConfig
from tests.nullcuda import device, runs
from tests.resolved import measure

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
from predict_vs_measured import shrunk

BOUNDS = {  # of a step of two micro-batches
    "mixtral-8x7b": {"launches": 5954, "synchronizations": 23, "copies": 111},
    "qwen3-30b-a3b": {"launches": 8458, "synchronizations": 22, "copies": 127},
    "deepseek-v2-lite": {"launches": 9100, "synchronizations": 22, "copies": 97},
}


@pytest.mark.parametrize("model", BOUNDS)
def test_a_step_asks_no_more_of_the_device(model: str, tmp_path: Path) -> None:
    """LoRA on the attention and two experts of four layers, 8-bit AdamW; the third step is like all that follow."""
    (tmp_path / "config.json").write_text(json.dumps(shrunk(model)), encoding="utf-8")
    config = runs.toy_run(tmp_path, "lora")
    two, three = (asked_in(config, steps) for steps in (2, 3))
    step = three - two
    asked = {"launches": step.launches, "synchronizations": step.synchronizations, "copies": step.copies}
    assert all(asked[what] <= bound for what, bound in BOUNDS[model].items()), asked
    assert step.registrations == 0


def asked_in(config: RunConfig, steps: int) -> device.Asked:
    before = device.asked()
    measure(config, "cuda", steps=steps)
    return device.asked() - before
