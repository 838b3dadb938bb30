"""What a step asks of the device: launches, waits of the host, copies. Upper bounds; lower them when they fall."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moetune.adapt.build import build
from moetune.config.schema import RunConfig
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.time.work import Work
from moetune.memory.trace import trace
from moetune.memory.trace.steps import Steps, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.step.batch import Batch
from moetune.training.step.micro_step import count_loss_tokens, token_loss
from tests.nullcuda import device, runs

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
from _common import config_of
from host_time import Case, host_time

BOUNDS = {  # of a step of two micro-batches, on 8.6, 8.9 and 9.0
    "mixtral-8x7b": {"launches": 2162, "synchronizations": 22, "copies": 29},
    "qwen3-30b-a3b": {"launches": 1986, "synchronizations": 22, "copies": 123},
    "deepseek-v2-lite": {"launches": 2712, "synchronizations": 20, "copies": 143},
}


@pytest.mark.parametrize("model", BOUNDS)
def test_a_step_asks_no_more_of_the_device(model: str, tmp_path: Path) -> None:
    """LoRA on the attention and two experts of four layers at full width, 8-bit AdamW; the third step is like all that
    follow. A trace counts the same."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(model, 4)), encoding="utf-8")
    config = runs.toy_run(tmp_path, "lora")
    step = asked_in_a_step(config)
    asked = {"launches": step.launches, "synchronizations": step.synchronizations, "copies": step.copies}
    assert all(asked[what] <= bound for what, bound in BOUNDS[model].items()), asked
    assert step.registrations == 0
    traced = trace(resolve(config, "cuda"), gpu=find_gpu(catalog_name(torch.device("cuda", 0))))
    work = sum(traced.work.values(), Work())
    assert work.launches == pytest.approx(step.launches, rel=0.15), step  # a trace counts operations
    assert step.synchronizations == work.synchronizations


LAYER_BOUNDS = {  # of a layer at full width and one micro-step: launches forward, backward, by major capability
    ("mixtral-8x7b", "0"): {8: (95, 173), 9: (95, 173)},
    ("qwen3-30b-a3b", "256MiB"): {8: (52, 106), 9: (60, 118)},
    ("qwen3-30b-a3b", "1GiB"): {8: (31, 67), 9: (33, 70)},
}


@pytest.mark.parametrize(("model", "expert_memory"), LAYER_BOUNDS)
def test_a_layer_of_full_width_asks_no_more_of_the_device(model: str, expert_memory: str, tmp_path: Path) -> None:
    """LoRA on attention and all experts, full checkpointing, 2 × 2048 tokens; of two layers and one the difference."""
    asked = []
    for layers in (1, 2):
        (tmp_path / "config.json").write_text(json.dumps(config_of(model, layers)))
        lora = {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}
        train = {"sequence_length": 2048, "expert_memory": expert_memory}
        config = runs.toy_run(tmp_path, "lora", adapt={"lora": lora}, train=train)
        asked.append(asked_in_a_micro_step(config))
    forward, backward, update = (two - one for one, two in zip(*asked, strict=True))
    most_forward, most_backward = LAYER_BOUNDS[model, expert_memory][torch.cuda.get_device_capability()[0]]
    assert forward.launches <= most_forward, forward
    assert backward.launches <= most_backward, backward
    assert forward.synchronizations + backward.synchronizations <= (0 if expert_memory == "1GiB" else 2)
    assert update.synchronizations == 0


def asked_in_a_step(config: RunConfig) -> device.Asked:
    """By the third step, from its first batch until it has ended. Building is left out: torch waits there once for each
    stretch of cached memory that it gives back, and how many there are depends on what ran before."""
    adapted, marks = build(resolve(config, "cuda"), "cuda"), []
    adapted.model.train()
    make = batches_of(adapted, device=torch.device("cuda"))

    def batch(rows: int) -> Batch:
        marks.append(device.asked())
        return make(rows)

    running = Steps(adapted, batch)
    running.run(Tracker(running.named), config.train.accumulate, steps=3, tracking=False)
    return device.asked() - marks[2 * config.train.accumulate]


def asked_in_a_micro_step(config: RunConfig) -> tuple[device.Asked, device.Asked, device.Asked]:
    """By the forward pass, the backward pass and the update, of the second step."""
    adapted = build(resolve(config, "cuda"), "cuda")
    adapted.model.train()
    optimizer = make_optimizer(adapted)
    batch = batches_of(adapted)(2)
    batch |= {name: value.cuda() for name, value in batch.items() if torch.is_tensor(value)}
    for _ in range(2):
        marks = [device.asked()]
        loss = token_loss(adapted.model, batch) / count_loss_tokens(batch)
        marks.append(device.asked())
        loss.backward()
        marks.append(device.asked())
        optimizer.step()
        marks.append(device.asked())
        optimizer.zero_grad()
    forward, backward, update = (after - before for before, after in pairwise(marks))
    return forward, backward, update


@pytest.mark.skipif(not device.is_present(), reason="a card's host time has its waits in it")
def test_the_hosts_time_is_of_micro_steps() -> None:
    """The benchmark: so many are timed."""
    found = host_time(Case("mixtral-8x7b", layers=1), repetitions=2)
    assert found["layers"] == 1
    assert len(found["seconds"]["all"]) == len(found["worked"]["all"]) == 2
    assert min(found["worked"]["all"]) > 0
