"""moetune's functions that take a resolved run, under the same names, for tests: here they resolve a configuration."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from moetune.config.schema import ModelConfig, RunConfig
from moetune.run.dtypes import device_kind, this_device
from moetune.run.resolve import examine, resolve, resolve_model

if TYPE_CHECKING:
    from moetune.adapt.build import Adapted
    from moetune.memory.measurement.measure import Measured
    from moetune.planning.verify import Outcome
    from moetune.training.run import TrainResult


def build(config: RunConfig, device: torch.device | str, *more: Any, **options: Any) -> Adapted:
    from moetune.adapt import build

    return build.build(resolve(config, device_kind(device)), device, *more, **options)


def train(
    config: RunConfig, *, device: torch.device | str | None = None, predicts: bool = False, **options: Any
) -> TrainResult:
    """Train; with `predicts`, also predict the memory for `memory.json`, which takes longer than the training."""
    from moetune.watch import memory_record
    from moetune.watch.train import train as watched

    with nullcontext() if predicts else patch.object(memory_record, "predicted", lambda *_: memory_record.Predicted()):
        return watched(examine(config, device_kind(device)), device=device, **options)


def measure(config: RunConfig, device: torch.device | str, *more: Any, **options: Any) -> Measured:
    from moetune.memory.measurement import measure

    return measure.measure(resolve(config, device_kind(device)), device, *more, **options)


def verify(config: RunConfig, *more: Any, **options: Any) -> Outcome:
    from moetune.planning import verify

    return verify.verify(resolve(config, this_device()), *more, **options)


def write_quantized_base(path: str, out: Path, base: Any, double_quant: bool) -> dict[str, Any]:
    """Write a quantized copy of the model `path` to the folder `out`, as `moetune quantize` does."""
    from moetune.adapt.weights.quantize import quantize

    how = {"path": path, "base": base, "double_quant": double_quant, "dtype": "bf16", "attention": "eager"}
    return quantize(resolve_model(ModelConfig.model_validate(how)), out)
