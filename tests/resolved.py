"""moetune's functions that take a resolved run, under the same names, for tests: here they resolve a configuration."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from moetune.config.schema import ModelConfig, RunConfig
from moetune.errors import raise_problems
from moetune.run.dtypes import DeviceType, device_kind, this_device
from moetune.run.resolve import ResolvedRun, examine, resolve, resolve_model

if TYPE_CHECKING:
    from moetune.adapt.build import Adapted
    from moetune.memory.measurement.measure import Measured
    from moetune.planning.verify import Outcome
    from moetune.training.run import TrainResult


_like: dict[Any, ResolvedRun] = {}
"""Runs of the models that were resolved last: resolving a small model takes as long as two of its steps."""


def _examined(config: RunConfig, device: DeviceType) -> ResolvedRun:
    """Resolve a run; the model is the one of the last run on it, if no file of its folder has changed since."""
    folder = Path(config.model.path)
    files = [(file.name, *file.stat()) for file in sorted(folder.iterdir())] if folder.is_dir() else []
    key = config.model.path, config.model.dtype, device, tuple(files)
    run = examine(config, device, like=_like.get(key))
    if len(_like) > 8:
        _like.clear()
    _like[key] = run
    return run


def build(config: RunConfig, device: torch.device | str, *more: Any, **options: Any) -> Adapted:
    from moetune.adapt import build

    run = _examined(config, device_kind(device))
    raise_problems(run.problems)
    return build.build(run, device, *more, **options)


def train(
    config: RunConfig,
    *,
    device: torch.device | str | None = None,
    predicts: bool = False,
    measures: bool = False,
    **options: Any,
) -> TrainResult:
    """Train; with `predicts`, also predict the memory for `memory.json`, and with either also measure it on a CPU: both
    take longer than the training."""
    from moetune.watch import memory_record
    from moetune.watch.train import train as watched

    with ExitStack() as stack:
        if not predicts:
            stack.enter_context(patch.object(memory_record, "predicted", lambda *_: memory_record.Predicted()))
        if not predicts and not measures and device_kind(device) == "cpu":
            stack.enter_context(patch.object(memory_record.MemoryRecord, "_begin", lambda _: None))
        return watched(_examined(config, device_kind(device)), device=device, **options)


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
