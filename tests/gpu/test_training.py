"""What only a GPU can show: the same gradients as on the CPU, and a run in bfloat16. Skipped without CUDA."""

from pathlib import Path

import pytest
import torch

from moetune.adapt.build import build
from moetune.experts.host import Lane, empty_on_host
from moetune.experts.packed import PackedStack
from moetune.run_file import load_run_config
from moetune.train.run import train

pytestmark = pytest.mark.gpu
CONFIGS = Path(__file__).parents[2] / "configs"
WAYS = ("router", "experts", "lora")


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_those_of_the_cpu(way: str) -> None:
    config = load_run_config(CONFIGS / f"tiny-{way}.yaml", ["model.dtype=fp32", "model.base=fp32"])
    ids = torch.randint(3, 2000, (2, 64), generator=torch.Generator().manual_seed(0))
    gradients = {}
    for device in ("cpu", "cuda"):
        adapted = build(config, device)
        adapted.model.train()
        batch = ids.to(device)
        adapted.model(batch, labels=batch, use_cache=False).loss.backward()
        gradients[device] = {name: p.grad.cpu() for name, p in adapted.trainable().items()}
    for name, expected in gradients["cpu"].items():
        error = (gradients["cuda"][name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < 1e-3, name  # float32 products in another order, through four layers


@pytest.mark.parametrize("way", WAYS)
def test_a_run_in_bfloat16_learns(way: str, tmp_path: Path) -> None:
    config = load_run_config(CONFIGS / f"tiny-{way}.yaml", [f"output={tmp_path / way}"])
    result = train(config, device="cuda")
    assert result.eval_loss_before is not None
    assert result.eval_loss_after is not None
    assert result.eval_loss_after < result.eval_loss_before - 0.1


@pytest.mark.parametrize("way", WAYS)
def test_what_waits_on_the_host_changes_no_gradient_and_is_pinned(way: str) -> None:
    ids = torch.randint(3, 2000, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    gradients, allocated = {}, {}
    for experts_on, checkpointing in (("gpu", "full"), ("host", "offload")):
        settings = [f"model.experts_on={experts_on}", f"train.checkpointing={checkpointing}", "model.dtype=fp32"]
        adapted = build(load_run_config(CONFIGS / f"tiny-{way}.yaml", settings), "cuda")
        adapted.model.train()
        for _ in range(3):
            adapted.model.zero_grad()
            adapted.model(ids, labels=ids, use_cache=False).loss.backward()
        gradients[experts_on] = {name: p.grad.clone() for name, p in adapted.trainable().items()}
        adapted.model.zero_grad()
        allocated[experts_on] = torch.cuda.memory_allocated()
        stacks = [module for module in adapted.model.modules() if isinstance(module, PackedStack) and module.on_host]
        assert all(buffer.is_pinned() for stack in stacks for buffer in stack.buffers())
        assert bool(stacks) == (experts_on == "host")
        del adapted, stacks
    for name, expected in gradients["gpu"].items():
        error = (gradients["host"][name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < 1e-5, name  # sums by atomics come in any order
    assert allocated["host"] < allocated["gpu"]


def test_large_memory_of_the_host_is_pinned_in_place() -> None:
    tensor = empty_on_host((3 << 20,), torch.uint8, torch.device("cuda"))
    assert tensor.is_pinned()
    assert torch.equal(Lane(torch.device("cuda")).to_device([tensor]).wait()[0].cpu(), tensor)
