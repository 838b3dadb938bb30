"""What is known from papers, as arithmetic: bytes of stored weights, optimizer states and master copies of n weights.

Mixed-precision Adam is 2 + 2 + 4 + 4 + 4 = 16 bytes a parameter (ZeRO, arXiv 1910.02054, section 3.1): weight,
gradient, and in float32 master copy and two moments. LOMO (arXiv 2306.09782) keeps neither gradients nor states. NF4
is half a byte and a float32 scale for 64 weights, or with double quantization a byte, and a float32 for 256 of these
(QLoRA, arXiv 2305.14314). docs/concepts/weights.md and optimizer-states.md explain them; predictions do not use them.
"""

from __future__ import annotations

import math

from moetune.config import OptimizerConfig

STORED = {
    "nf4": "n/2 + 4·⌈n/64⌉ a matrix of n weights",
    "nf4, double-quantized": "n/2 + ⌈n/64⌉ + 4·⌈n/64/256⌉ + 4 a matrix of n weights",
    "int8": "n + 4·rows a matrix of n weights",
    "mxfp4": "17·⌈n/32⌉ a matrix of n weights",
    "bf16": "2·n",
    "fp32": "4·n",
}
STATES = {
    "adamw": "2·b·n: two moments in the dtype that is updated",
    "paged_adamw": "8·n: two float32 moments",
    "adamw8bit": "2·(n + 4·⌈n/256⌉); 8·n for tensors below 4,096 elements",
    "paged_adamw8bit": "2·(n + 4·⌈n/256⌉); 8·n for tensors below 4,096 elements",
    "lion8bit": "n + 4·⌈n/256⌉; 4·n for tensors below 4,096 elements",
    "ademamix8bit": "3·(n + 4·⌈n/256⌉); 12·n for tensors below 4,096 elements",
    "adafactor": "4·(R + C) a matrix [R, C]; 4·n for vectors",
    "adalomo": "4·(R + C) a matrix [R, C]; 4·n for vectors",
    "sgd": "b·n: momentum",
    "lomo": "0",
}
_MOMENTS_8BIT = {"adamw8bit": 2, "paged_adamw8bit": 2, "lion8bit": 1, "ademamix8bit": 3}
_BLOCK_8BIT = 256  # elements that share a scale
_SMALLEST_8BIT = 4096  # elements; smaller tensors keep float32 states


def state_bytes(optimizer: OptimizerConfig, shape: tuple[int, ...], width: int) -> int:
    """Bytes that an optimizer keeps of a tensor of so many bytes an element, which it updates."""
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
    """Bytes of a parameter in a checkpoint: itself, its float32 copy if one is kept, and its states."""
    in_float32 = optimizer.offload or (optimizer.master_weights != "none" and width < 4)
    kept = optimizer.offload or (optimizer.master_weights == "fp32" and width < 4)
    numel = math.prod(shape)
    return numel * (width + (4 if kept else 0)) + state_bytes(optimizer, shape, 4 if in_float32 else width)
