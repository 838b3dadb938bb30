"""The one door from tensors to numbers in a step. A prediction runs the same step on tensors without values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def as_float(value: Tensor) -> float:
    """The number in a tensor of one element; waits for the device. Of a fake tensor 0: finite, nothing to clip."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return 0.0
    return float(value)


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the random generators that a step on this device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
