"""Helpers for a step's tensors: reading a number, clipping, norms, random states.

A prediction runs the same step on fake tensors, which have no values. So the step reads numbers only by `as_float`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def as_float(value: Tensor) -> float:
    """Return the value of a tensor with one element, waiting for the device; 0.0 for a fake or meta tensor."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return 0.0
    return float(value)


def bound_(gradient: Tensor, bound: float) -> None:
    """Clip every element of a gradient to the range ±bound, in place.

    If an element is NaN or infinite, all elements become NaN, so that a later check of the norm finds it. A gradient
    without elements, as of an empty shard, is left as it is.
    """
    if not gradient.numel():
        return
    bound = min(bound, torch.finfo(gradient.dtype).max)
    largest = torch.linalg.vector_norm(gradient, torch.inf)
    gradient.clamp_(-bound, bound).add_(largest * 0)


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of one or more gradients together, a scalar.

    It is computed in float32, because the norm of float16 gradients can overflow float16.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def generator_states(device: torch.device) -> list[Tensor]:
    """Return copies of the states of the random generators that a step on `device` uses: the CPU's, and a GPU's."""
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    """Restore the states that `generator_states` returned; those of a CPU leave the generator of a GPU as it is."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
