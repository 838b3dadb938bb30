"""Micro-batches layer by layer: gradients of one after the other, and each layer's experts copied once a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetune.adapt.attention import document_inputs
from moetune.adapt.build import Adapted
from moetune.experts.host import CopyStream
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.step.batch import Batch, collate, random_rows
from moetune.training.step.micro_step import MicroStep, count_loss_tokens
from moetune.training.step.stepper import Stepper
from tests.reference import build_toy
from tests.thinned import in_pairs, thinned
from tests.toys import VOCAB, expert_model_types, toy_config

LORA = {"router": "all", "lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}}
MIXED = {
    "router": "all",
    "experts": {"ids": [0, 3]},
    "lora": {"rank": 2, "alpha": 4, "targets": ["experts"], "ids": [1]},
}
TYPES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "qwen3_next"]


def toy(folder: Path, model_type: str, adapt: dict[str, Any], together: bool, **train: Any) -> Adapted:
    settings = {"layer_by_layer": together, "accumulate": 3} | train
    model = {"experts_on": "host", "base": "nf4"}
    adapted = build_toy(toy_config(model_type), folder, adapt, model=model, train=settings)
    adapted.model.train()
    return adapted


def batches_of(adapted: Adapted, *, packing: bool) -> list[Batch]:
    """Three micro-batches, the last of a single row."""
    torch.manual_seed(3)
    return [
        collate(random_rows(count, 16, VOCAB, packing=packing), 0, document_inputs=document_inputs(adapted.model))
        for count in (2, 2, 1)
    ]


def stepped(adapted: Adapted, batches: list[Batch]) -> tuple[list[MicroStep], dict[str, Tensor]]:
    """Run a step's micro-batches; return their results, and the gradients."""
    stepper = Stepper(adapted, make_optimizer(adapted))
    total = torch.stack([count_loss_tokens(batch) for batch in batches]).sum()
    if stepper.takes_all:
        done = stepper.micro_steps(batches, total)
    else:
        done = [stepper.micro_step(batch, total) for batch in batches]
    stepper.watch.remove()
    gradients = {name: p.grad.clone() for name, p in adapted.trainable().items() if p.grad is not None}
    adapted.model.zero_grad()
    return done, gradients


def assert_equal(folder: Path, model_type: str, adapt: dict[str, Any], packing: bool, **train: Any) -> None:
    import random

    expected_done = expected = None
    for together in (False, True):
        adapted = toy(folder, model_type, adapt, together, **train)
        random.seed(5)
        done, gradients = stepped(adapted, batches_of(adapted, packing=packing))
        if expected is None:
            expected_done, expected = done, gradients
    assert gradients.keys() == expected.keys()
    bits = all(torch.equal(gradients[n], g) for n, g in expected.items())
    print(
        model_type,
        packing,
        train,
        "bits"
        if bits
        else max(float((gradients[n] - g).abs().max() / g.abs().max().clamp(min=1e-9)) for n, g in expected.items()),
    )
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()), msg=name
        )
    for mine, other in zip(done, expected_done, strict=True):
        assert torch.equal(mine.loss, other.loss)
        assert mine.load.keys() == other.load.keys()
        assert all(torch.equal(mine.load[layer], load) for layer, load in other.load.items())
        assert mine.router_loss is None or torch.equal(mine.router_loss, other.router_loss)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "full", "offload"])
@pytest.mark.parametrize("model_type", TYPES)
def test_gradients(tmp_path: Path, model_type: str, checkpointing: str, packing: bool) -> None:
    assert_equal(
        tmp_path,
        model_type,
        LORA,
        packing,
        checkpointing=checkpointing,
        router_aux_loss=0.02 if checkpointing == "full" else 0.0,
    )


@pytest.mark.parametrize("model_type", thinned(expert_model_types(), 4))
def test_types(tmp_path: Path, model_type: str) -> None:
    assert_equal(tmp_path, model_type, LORA, False, checkpointing="full")
