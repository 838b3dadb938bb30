"""Numbers out of tensors. A prediction runs steps on tensors without values, so a step reads values here only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def as_float(value: Tensor) -> float:
    """Return the number in a tensor of one element, waiting for the device; 0 for a fake tensor."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return 0.0
    return float(value)


def bound_(gradient: Tensor, bound: float) -> None:
    """Clip every element to ±bound. A gradient with an element that is not finite becomes NaN, to be found later."""
    bound = min(bound, torch.finfo(gradient.dtype).max)
    largest = torch.linalg.vector_norm(gradient, torch.inf)
    gradient.clamp_(-bound, bound).add_(largest * 0)


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of all together, in float32: in float16 it may overflow where no gradient does."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the random generators that a step on this device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    """Restore what `generator_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
