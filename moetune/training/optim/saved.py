"""Sizes in bytes of optimizer states and of saved parameters, computed from shapes."""

import math

from moetune.config.schema import OptimizerConfig

_MOMENTS_8BIT = {"adamw8bit": 2, "paged_adamw8bit": 2, "lion8bit": 1, "ademamix8bit": 3}
_BLOCK_8BIT = 256  # elements that share a float32 scale
SMALLEST_8BIT = 4096
"""Elements of the smallest tensor of which an 8-bit optimizer of bitsandbytes keeps 8-bit states."""


def state_bytes(optimizer: OptimizerConfig, shape: tuple[int, ...], width: int) -> int:
    """Return the bytes of the optimizer states of one tensor of n elements, of `width` bytes each:

        adamw                2·n·width + 4 (the step count)
        paged_adamw          8·n
        8-bit optimizers     n + 4·⌈n / 256⌉ for each moment; 4·n below 4096 elements
        adafactor, adalomo   4·(R + C) for each matrix [R, C]; 4·n for a vector
        sgd                  n·width with momentum, else 0
        lomo                 0

    `shape` and `width` are those of the updated tensor on this rank: `width` is 4 for a float32 copy.
    """
    numel = math.prod(shape)
    if optimizer.name in _MOMENTS_8BIT:
        moments = _MOMENTS_8BIT[optimizer.name]
        return moments * (4 * numel if numel < SMALLEST_8BIT else numel + 4 * -(-numel // _BLOCK_8BIT))
    match optimizer.name:
        case "adamw":
            return 2 * numel * width + 4  # two moments, and a float32 step count
        case "paged_adamw":
            return 8 * numel
        case "adafactor" | "adalomo":
            return 4 * (sum(shape[-2:]) * math.prod(shape[:-2]) if len(shape) > 1 else numel)
        case "sgd":
            return numel * width if optimizer.momentum else 0
    return 0


def saved_bytes(optimizer: OptimizerConfig, shape: tuple[int, ...], width: int) -> int:
    """Return the bytes that a parameter, of `shape` on this rank and `width` bytes an element, takes in a checkpoint.

    These are its weights, their float32 copy if there is one between steps, and its optimizer states.
    """
    in_float32 = optimizer.offload or (optimizer.master_weights != "none" and width < 4)
    kept = optimizer.offload or (optimizer.master_weights == "fp32" and width < 4)
    numel = math.prod(shape)
    return numel * (width + (4 if kept else 0)) + state_bytes(optimizer, shape, 4 if in_float32 else width)
