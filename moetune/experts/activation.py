"""An expert's activation: gate_up rows [N, O] -> act rows [N, I], and the way back.

SwiGLU and its clamped variant have a kernel:

| | |
|---|---|
| SwiGLU | silu(gate) · up |
| gpt-oss | g = min(gate, limit); g · σ(alpha·g) · (clamp(up, ±limit) + 1) |

Which one a model has follows from its experts module's `alpha` and `limit`, confirmed by comparing numbers over the
range of float32. Any other function runs as it is, with autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from moetune.compat.torch import unset_fake_temporarily
from moetune.experts.kernels import operators as kernels
from moetune.experts.projection import RowWeights
from moetune.models.moe import ExpertShape


class Activation(Protocol):
    """Activation of the rows of an expert, without a gradient in forward."""

    def forward(self, gate_up_NO: Tensor) -> Tensor:
        """Return act rows [N, I]."""

    def backward(
        self, gate_up_NO: Tensor, dact_NI: Tensor, weights: RowWeights, dweights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (act, the weighted gradient of gate_up), given gradients of act before weighting. Write ⟨dact, act⟩
        into `dweights` [T·K]. Both inputs are overwritten."""


@dataclass(frozen=True)
class SwiGLU:
    """SwiGLU, clamped if `limit` is not 0.

    Attributes:
        interleaved: gate and up alternate in the columns of gate_up; otherwise up follows gate.
    """

    interleaved: bool
    alpha: float = 1.0
    limit: float = 0.0

    def forward(self, gate_up_NO: Tensor) -> Tensor:
        return kernels.gated(gate_up_NO, self.interleaved, self.alpha, self.limit)

    def backward(
        self, gate_up_NO: Tensor, dact_NI: Tensor, weights: RowWeights, dweights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        kernels.gated_backward_(gate_up_NO, dact_NI, *weights, dweights, self.interleaved, self.alpha, self.limit)
        return dact_NI, gate_up_NO


@dataclass(frozen=True)
class AutogradActivation:
    """A model's own function, differentiable and without parameters."""

    function: Callable[[Tensor], Tensor]

    def forward(self, gate_up_NO: Tensor) -> Tensor:
        return self.function(gate_up_NO)

    def backward(
        self, gate_up_NO: Tensor, dact_NI: Tensor, weights: RowWeights, dweights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        gate_up_NO.requires_grad_()
        with torch.enable_grad():
            act_NI = self.function(gate_up_NO)
        edge, act_NI = get_gradient_edge(act_NI), act_NI.detach()  # backward does not need the rows themselves
        if dweights is not None:
            dweights.index_copy_(0, weights.order, torch.einsum("ni,ni->n", dact_NI, act_NI).to(dweights.dtype))
        (dgate_up_NO,) = torch.autograd.grad(edge, gate_up_NO, dact_NI.mul_(weights.column(dact_NI.dtype)))
        return act_NI, dgate_up_NO


def recognize(function: Callable[[Tensor], Tensor], shape: ExpertShape) -> Activation:
    """Return the activation with a kernel that computes a model's function, or the function with autograd."""
    if not shape.has_gate:
        return AutogradActivation(function)
    constants: dict[str, float] = {}
    for name in ("alpha", "limit"):
        for key in (name, f"swiglu_{name}"):
            if (value := getattr(getattr(function, "__self__", None), key, None)) is not None:
                constants[name] = float(value)
    swiglu = SwiGLU(not shape.is_concatenated, **constants)
    with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
        pairs = _over_the_range(shape.intermediate)
        rows = pairs.transpose(-1, -2).flatten(1) if swiglu.interleaved else pairs.flatten(1)
        found, given = swiglu.forward(rows), function(rows.clone())
        is_same = found.shape == given.shape and torch.allclose(found, given, rtol=1e-5, atol=1e-6)
    return swiglu if is_same else AutogradActivation(function)


def _over_the_range(intermediate: int) -> Tensor:
    """Pairs of gate and up of every magnitude of float32, so that no limit lies beyond them: [N, 2, I]."""
    sizes = 2.0 ** torch.arange(-8, 128, 3)
    values = torch.cat([-sizes, torch.zeros(1), sizes])
    pairs = torch.cartesian_prod(values, values)
    pairs = torch.cat([pairs, pairs.new_zeros(-len(pairs) % intermediate, 2)])
    return pairs.view(-1, intermediate, 2).mT
