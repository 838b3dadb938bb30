"""What only a GPU can show of gradients: they are those of the CPU, wherever what they are made from waits."""

from pathlib import Path

import pytest
import torch

from moetune.config.load import load_run_config
from tests.resolved import build

pytestmark = pytest.mark.gpu
CONFIGS = Path(__file__).parents[2] / "configs"
WAYS = ("router", "experts", "lora")


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_those_of_the_cpu(way: str) -> None:
    config = load_run_config(CONFIGS / f"tiny-{way}.yaml", ["model.dtype=fp32", "model.base=fp32"])
    ids = torch.randint(3, 2000, (2, 64), generator=torch.Generator().manual_seed(0))
    gradients, start = {}, {}
    for device in ("cpu", "cuda"):
        adapted = build(config, device)
        with torch.no_grad():
            for name, weight in adapted.trainable().items():
                weight.copy_(start.setdefault(name, weight.cpu()))  # each device draws LoRA factors of its own
        adapted.model.train()
        batch = ids.to(device)
        adapted.model(batch, labels=batch, use_cache=False).loss.backward()
        gradients[device] = {name: p.grad.cpu() for name, p in adapted.trainable().items()}
    for name, expected in gradients["cpu"].items():
        error = (gradients["cuda"][name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < 1e-3, name  # float32 products in another order, through four layers


@pytest.mark.parametrize("way", WAYS)
def test_what_waits_on_the_host_changes_no_gradient(way: str) -> None:
    ids = torch.randint(3, 2000, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    gradients = {}
    for experts_on, checkpointing in (("gpu", "full"), ("host", "offload")):
        settings = [f"model.experts_on={experts_on}", f"train.checkpointing={checkpointing}", "model.dtype=fp32"]
        adapted = build(load_run_config(CONFIGS / f"tiny-{way}.yaml", settings), "cuda")
        adapted.model.train()
        for _ in range(3):
            adapted.model.zero_grad()
            adapted.model(ids, labels=ids, use_cache=False).loss.backward()
        gradients[experts_on] = {name: p.grad.clone() for name, p in adapted.trainable().items()}
    for name, expected in gradients["gpu"].items():
        error = (gradients["host"][name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < 1e-5, name  # sums by atomics come in any order
