"""The activations that have a kernel: gate and up of an expert become one row.

| | |
|---|---|
| SwiGLU | silu(gate) · up |
| gpt-oss | g = min(gate, limit); g · σ(alpha·g) · (clamp(up, ±limit) + 1) |

Which one a model has, its experts module says by its `alpha` and `limit`; its own function has to give the same numbers
over the range of float32. Any other function runs as it is, with autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from moetune.experts.kernels import operators as kernels
from moetune.experts.projection import Weighted
from moetune.models.moe import ExpertShape


@dataclass(frozen=True)
class Activation:
    """One of them. Without a `limit`, 0, it is SwiGLU.

    Attributes:
        interleaved: whether gate and up take turns in the columns of gate_up; otherwise up follows gate.
    """

    interleaved: bool
    alpha: float = 1.0
    limit: float = 0.0

    @classmethod
    def of(cls, activation: Callable[[Tensor], Tensor], shape: ExpertShape) -> Activation | None:
        """The one that a model's function is, if it is one: what its module says, confirmed by its numbers."""
        if not shape.has_gate:
            return None
        said: dict[str, float] = {}
        for name in ("alpha", "limit"):
            for key in (name, f"swiglu_{name}"):
                if (value := getattr(getattr(activation, "__self__", None), key, None)) is not None:
                    said[name] = float(value)
        gate = cls(not shape.is_concatenated, **said)
        with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
            pairs = _over_the_range(shape.intermediate)
            rows = pairs.transpose(-1, -2).flatten(1) if gate.interleaved else pairs.flatten(1)
            return gate if _are_close(gate.forward(rows), activation(rows.clone())) else None

    def forward(self, gate_up_NO: Tensor) -> Tensor:
        """act rows [N, I]"""
        return kernels.gated(gate_up_NO, self.interleaved, self.alpha, self.limit)

    def backward_(self, gate_up_NO: Tensor, dact_NI: Tensor, weighted: Weighted, dweights: Tensor | None) -> None:
        """gate_up becomes its weighted gradient, and dact act; `dweights` [T·K] gets ⟨dact, act⟩."""
        kernels.gated_backward_(gate_up_NO, dact_NI, *weighted, dweights, self.interleaved, self.alpha, self.limit)


def _over_the_range(intermediate: int) -> Tensor:
    """Pairs of gate and up of every magnitude that float32 has, so that no limit lies beyond them: [N, 2, I]."""
    sizes = 2.0 ** torch.arange(-8, 128, 3)
    values = torch.cat([-sizes, torch.zeros(1), sizes])
    pairs = torch.cartesian_prod(values, values)
    pairs = torch.cat([pairs, pairs.new_zeros(-len(pairs) % intermediate, 2)])
    return pairs.view(-1, intermediate, 2).mT


def _are_close(found: Tensor, given: Tensor) -> bool:
    return found.shape == given.shape and torch.allclose(found, given, rtol=1e-5, atol=1e-6)
