"""PEFT."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def cast_inputs_by(module: nn.Module, cast: Callable[[Tensor, torch.dtype], Tensor]) -> None:
    """Lets a LoRA layer cast its input by `cast(x, dtype)` before it multiplies with A.

    PEFT's own makes a copy for each layer, where q, k and v read the same input, and backward keeps them all. It can be
    switched off (`cast_input_dtype_enabled`), but not replaced.
    """
    module._cast_input_dtype = cast  # type: ignore[assignment]
