"""What stays on the host is pinned, and not on the device. No values are needed, so the null device shows it too."""

import gc
from pathlib import Path

import pytest
import torch

from moetune.config.load import load_run_config
from moetune.experts.host import CopyStream, empty_on_host
from moetune.experts.quantized import QuantizedExperts
from tests.resolved import build

pytestmark = pytest.mark.gpu(values=False)
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("way", ["router", "experts", "lora"])
def test_experts_on_the_host_are_pinned_and_leave_the_device(way: str) -> None:
    ids = torch.randint(3, 2000, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    allocated = {}
    for experts_on, checkpointing in (("gpu", "full"), ("host", "offload")):
        settings = [f"model.experts_on={experts_on}", f"train.checkpointing={checkpointing}"]
        adapted = build(load_run_config(CONFIGS / f"tiny-{way}.yaml", settings), "cuda")
        adapted.model.train()
        for _ in range(3):
            adapted.model.zero_grad()
            adapted.model(ids, labels=ids, use_cache=False).loss.backward()
        adapted.model.zero_grad()
        allocated[experts_on] = torch.cuda.memory_allocated()
        stacks = [
            module for module in adapted.model.modules() if isinstance(module, QuantizedExperts) and module.on_host
        ]
        assert all(buffer.is_pinned() for stack in stacks for buffer in stack.buffers())
        assert bool(stacks) == (experts_on == "host")
        del adapted, stacks
        gc.collect()
    assert allocated["host"] < allocated["gpu"]


@pytest.mark.parametrize("size", [100, 3 << 20], ids=["small", "large"])
def test_memory_of_the_host_is_pinned_in_place_and_copied(size: int) -> None:
    tensor = empty_on_host((size,), torch.uint8, torch.device("cuda")).random_()
    assert tensor.is_pinned()
    assert torch.equal(CopyStream(torch.device("cuda")).to_device([tensor]).wait()[0].cpu(), tensor)
