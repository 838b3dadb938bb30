"""Run files of a toy Mixtral, and what one takes on the device beside what is predicted."""

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch

from moetune.config.schema import RunConfig
from moetune.memory.measurement.measure import catalog_name
from moetune.models.catalog import find_model
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.predict import predict
from tests.nullcuda import device
from tests.resolved import measure

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"router": "1", "experts": {"layers": "0-1", "ids": [0, 2]}},
    "lora": {"lora": {"rank": 8, "alpha": 8, "targets": ["attention", "experts"], "layers": "all", "ids": [1, 3]}},
}


def write_toy(folder: Path, **sizes: int) -> Path:
    entry = find_model("tiny-mixtral")
    assert entry is not None
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(entry.config | SIZES | sizes), encoding="utf-8")
    return folder


def toy_run(model: Path, adapt: str, /, **sections: dict[str, Any]) -> RunConfig:
    """Two micro-batches of 2 × 128 tokens a step, on NF4 in bfloat16; `sections` are merged into it."""
    run: dict[str, Any] = {
        "model": {"path": str(model), "weights": "random", "dtype": "bf16"},
        "adapt": ADAPT[adapt],
        "optimizer": {"name": "adamw8bit"},
        "train": {"micro_batch": 2, "accumulate": 2, "sequence_length": 128},
    }
    for name, section in sections.items():
        run[name] = run.get(name, {}) | section
    return RunConfig.model_validate(run)


def clear() -> None:
    """The device is as in a process that has used bitsandbytes once: it keeps a table of levels there for good."""
    bnb.quantize_4bit(torch.zeros(64, 64, device="cuda"), compress_statistics=True)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class Compared:
    """Bytes in two steps: predicted, and counted by torch's caching allocator or by the device.

    Attributes:
        managed: states of paged optimizers; bitsandbytes pages those of parameters that have 100,000 weights.
    """

    predicted: int
    measured: int
    managed_predicted: int
    managed: int

    @property
    def off(self) -> int:
        return self.predicted - self.measured


def compare(config: RunConfig) -> Compared:
    card = torch.device("cuda", 0)
    before, managed = torch.cuda.memory_allocated(card), device.asked().managed
    measured = measure(config, card, steps=2)
    managed = device.asked().managed - managed
    gpu = catalog_name(card)
    rank = predict(config, gpu=gpu, routing=measured.routing).fullest
    outside = rank.outside_allocator - find_gpu(gpu).context.value
    return Compared(rank.peak_allocated, measured.peak_allocated - before, outside, managed)
