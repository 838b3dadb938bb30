"""Bytes of optimizer states and of checkpoints, from shapes."""

from __future__ import annotations

import math

from moetune.config.schema import OptimizerConfig

_MOMENTS_8BIT = {"adamw8bit": 2, "paged_adamw8bit": 2, "lion8bit": 1, "ademamix8bit": 3}
_BLOCK_8BIT = 256  # elements that share a scale
_SMALLEST_8BIT = 4096  # elements; smaller tensors keep float32 states


def state_bytes(optimizer: OptimizerConfig, shape: tuple[int, ...], width: int) -> int:
    """Return the bytes of an optimizer's states for a tensor of `width` bytes an element."""
    numel = math.prod(shape)
    if optimizer.name in _MOMENTS_8BIT:
        moments = _MOMENTS_8BIT[optimizer.name]
        return moments * (4 * numel if numel < _SMALLEST_8BIT else numel + 4 * -(-numel // _BLOCK_8BIT))
    match optimizer.name:
        case "adamw":
            return 2 * numel * width + 4  # and a step count
        case "paged_adamw":
            return 8 * numel
        case "adafactor" | "adalomo":
            return 4 * (sum(shape[-2:]) * math.prod(shape[:-2]) if len(shape) > 1 else numel)
        case "sgd":
            return numel * width if optimizer.momentum else 0
    return 0


def saved_bytes(optimizer: OptimizerConfig, shape: tuple[int, ...], width: int) -> int:
    """Return the bytes of a parameter in a checkpoint: itself, its float32 copy if one is kept, and its states."""
    in_float32 = optimizer.offload or (optimizer.master_weights != "none" and width < 4)
    kept = optimizer.offload or (optimizer.master_weights == "fp32" and width < 4)
    numel = math.prod(shape)
    return numel * (width + (4 if kept else 0)) + state_bytes(optimizer, shape, 4 if in_float32 else width)
