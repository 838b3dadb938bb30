"""The values of gradients: the one door from tensors to numbers in a step, which a prediction runs without values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def as_float(value: Tensor) -> float:
    """The number in a tensor of one element; waits for the device. Of a fake tensor 0: finite, nothing to clip."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return 0.0
    return float(value)


def bound_(gradient: Tensor, bound: float) -> None:
    """Clips every element to ±bound. A gradient with an element that is not finite becomes NaN: it must be found."""
    bound = min(bound, torch.finfo(gradient.dtype).max)
    largest = torch.linalg.vector_norm(gradient, torch.inf)
    gradient.clamp_(-bound, bound).add_(largest * 0)


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all together, in float32: a float16 norm of scaled gradients overflows where none of them does."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the random generators that a step on this device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
