"""PEFT."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear


class Factor(nn.Linear):
    """A low-rank factor, float32, which multiplies in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


def compute_in_the_inputs_dtype(layer: Any) -> None:
    """Lets a LoRA layer multiply in the dtype of its input, and scale the narrow rows.

    PEFT's own casts the input to the factors' dtype, in which it scales all rows of the output and adds, and clones
    what a 4-bit layer gives. Its cast can be switched off (`cast_input_dtype_enabled`), but then dtypes disagree.
    """
    for factors in (layer.lora_A, layer.lora_B):
        assert type(factors["default"]) is nn.Linear
        factors["default"].__class__ = Factor
    layer.forward = partial(_forward, layer)


def _forward(layer: Any, x: Tensor) -> Tensor:
    out: Tensor = layer.base_layer(x)
    if layer.disable_adapters or layer.merged:
        return out
    A, B, dropout = (of["default"] for of in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    return out + B(A(dropout(x)) * layer.scaling["default"])  # not in place: under tp either may be a view
