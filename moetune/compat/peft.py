"""PEFT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Factor(nn.Linear):
    """A low-rank factor, float32, which multiplies in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


AtOnce = Callable[[nn.Module, Tensor, Factor, Factor, float], Tensor | None]
"""Of a base layer, its input, A, B and their scale what the adapted layer gives; None where it cannot."""


def compute_in_the_inputs_dtype(layer: Any, at_once: AtOnce) -> None:
    """Let a LoRA layer multiply in the dtype of its input, and scale the narrow rows.

    PEFT's own casts the input to the factors' dtype, in which it scales all rows of the output and adds, and clones
    what a 4-bit layer gives. Its cast can be switched off (`cast_input_dtype_enabled`), but then dtypes disagree.
    Where a layer trains and no dropout comes between, it is asked for all of it `at_once`.
    """
    for factors in (layer.lora_A, layer.lora_B):
        assert type(factors["default"]) is nn.Linear
        factors["default"].__class__ = Factor
    layer.forward = partial(_forward, layer, at_once)


def _forward(layer: Any, at_once: AtOnce, x: Tensor) -> Tensor:
    base, scale = layer.base_layer, layer.scaling["default"]
    if layer.disable_adapters or layer.merged:
        return base(x)
    A, B, dropout = (of["default"] for of in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    out: Tensor | None = None
    if torch.is_grad_enabled() and isinstance(dropout, nn.Identity):
        out = at_once(base, x, A, B, scale)
    if out is None:
        out = base(x) + B(A(dropout(x)) * scale)  # not in place: under tp either may be a view
    return out
