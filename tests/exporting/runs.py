"""Run folders of toys, as training leaves them, without the training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.adapt.build import Adapted
from moetune.config.schema import RunConfig
from moetune.models.hub.fingerprint import Base, take_fingerprint
from moetune.tensor_files import weight_files
from moetune.training.folder.checkpoint import TRAINED_FILE, parts_of
from moetune.training.folder.run_writer import RunWriter
from moetune.training.same_run import Inputs
from tests.reference import run_config
from tests.resolved import build
from tests.toys import toy_model

FULL: dict[str, Any] = {"router": "1", "experts": {"layers": "1", "ids": [0, 5]}, "also": ["norm"]}
LORA: dict[str, Any] = {"rank": 2, "alpha": 5, "targets": ["attention", "experts"], "layers": "1", "ids": [2, 3]}
ADAPT: dict[str, dict[str, Any]] = {
    "full": FULL,
    "lora": {"lora": {**LORA, "ids": "all"}},
    "both": {**FULL, "also": ["norm", "embedding"], "lora": {**LORA, "gate_up": "split"}},
    "all": {"also": ["*"]},
}


@dataclass(frozen=True)
class ToyRun:
    """A run folder, the base it started from, and the model that is in its checkpoint."""

    path: Path
    base: Path
    config: RunConfig
    adapted: Adapted

    def fresh(self, adapt: dict[str, Any] | None = None, **lora: Any) -> Adapted:
        """The model before training; with another choice of what trains, or other settings of adapt.lora."""
        raw = adapt or self.config.adapt.model_dump()
        raw = raw | {"lora": raw["lora"] | lora} if lora else raw
        adapted = build(run_config(self.base, raw, model=self.config.model.model_dump()), "cpu")
        adapted.model.eval()
        return adapted


def make_toy(model_type: str, *, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A toy in float32 whose routers choose clearly and whose biases are not zero."""
    model = toy_model(model_type, seed=seed, **sizes)
    draw_biases_and_routers_(model)
    return model


def write_base(folder: Path, model_type: str, *, shard: str = "50GB", dtype: Any = torch.float32, **more: Any) -> Path:
    """A toy in hub format, as transformers saves it."""
    make_toy(model_type, **more).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


@torch.no_grad()
def draw_biases_and_routers_(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if ".gate.weight" in name or ".router.weight" in name:
            parameter.normal_(std=0.5, generator=generator)
        elif parameter.ndim == 1 and "norm" not in name:
            parameter.normal_(std=0.1, generator=generator)


def write_run(
    path: Path,
    base: Path,
    adapt: dict[str, Any],
    *,
    steps: tuple[int, ...] = (7,),
    storage: Any = "fp32",
    **train: Any,
) -> ToyRun:
    """A run whose every trained tensor has moved, its checkpoints written through the project's own run folder."""
    settings = {"weights": "pretrained", "base": storage, "dtype": "fp32"}
    config = run_config(base, adapt, model=settings, train=train or {}, output=str(path))
    adapted = build(config, "cpu")
    adapted.model.eval()
    folder = RunWriter(path)
    folder.create(config, None, False, Base(base.name, take_fingerprint(base)), Inputs("0" * 32, {}, {}, {}))
    generator = torch.Generator().manual_seed(4)
    for step in steps:
        with torch.no_grad():
            for parameter in adapted.trainable().values():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        with folder.new_checkpoint(step, keep=3) as aside:
            save_file(trained_of(adapted), aside / TRAINED_FILE)
    return ToyRun(path, base, config, adapted)


def trained_of(adapted: Adapted) -> dict[str, Tensor]:
    """What trains, by the names and in the parts of a checkpoint."""
    parts = [part for all_ in parts_of(adapted).values() for part in all_]
    return {part.name: part.of(part.parameter.detach()).contiguous() for part in parts}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in hub format, as safetensors itself reads it."""
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
