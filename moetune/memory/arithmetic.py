"""What is known from papers, as arithmetic: bytes of stored weights, optimizer states and master copies of n weights.

Mixed-precision Adam is 2 + 2 + 4 + 4 + 4 = 16 bytes a parameter (ZeRO, arXiv 1910.02054, section 3.1): weight,
gradient, and in float32 master copy and two moments. LOMO (arXiv 2306.09782) keeps neither gradients nor states. NF4
is half a byte and a float32 scale for 64 weights, or with double quantization a byte, and a float32 for 256 of these
(QLoRA, arXiv 2305.14314). docs/concepts/weights.md and optimizer-states.md explain them; predictions do not use them.
"""

from __future__ import annotations

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
