"""The activations that have a kernel: gate and up of an expert become one row.

| | |
|---|---|
| SwiGLU | silu(gate) · up |
| gpt-oss | g = min(gate, limit); g · σ(alpha·g) · (clamp(up, ±limit) + 1) |

A model's own function is taken for one of them if it gives the same numbers. Any other runs as it is, with autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from moetune.anatomy.anatomy import ExpertShape
from moetune.experts import kernels
from moetune.experts.projection import Weighted


@dataclass(frozen=True)
class Gate:
    """One of them. Without a `limit`, 0, it is SwiGLU.

    Attributes:
        interleaved: whether gate and up take turns in the columns of gate_up; otherwise up follows gate.
    """

    interleaved: bool
    alpha: float = 1.0
    limit: float = 0.0

    @classmethod
    def of(cls, activation: Callable[[Tensor], Tensor], shape: ExpertShape) -> Gate | None:
        """The one that a model's function is, if it is one."""
        if not shape.has_gate:
            return None
        of_model = getattr(activation, "__self__", None)
        alpha, limit = getattr(of_model, "alpha", None), getattr(of_model, "limit", None)
        gates = [cls(not shape.is_concatenated)]
        if isinstance(alpha, float) and isinstance(limit, float) and limit > 0:
            gates.append(cls(not shape.is_concatenated, alpha, limit))
        with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
            up, gate = torch.meshgrid(
                torch.linspace(-12, 12, 10), torch.linspace(-12, 12, shape.intermediate), indexing="ij"
            )
            rows = torch.stack([gate, up], 2 if gates[0].interleaved else 1).flatten(1)
            given = activation(rows.clone())
            return next((one for one in gates if _are_close(one.forward(rows), given)), None)

    def forward(self, gate_up_NO: Tensor) -> Tensor:
        """act rows [N, I]"""
        return kernels.gated(gate_up_NO, self.interleaved, self.alpha, self.limit)

    def backward_(self, gate_up_NO: Tensor, dact_NI: Tensor, weighted: Weighted, dweights: Tensor | None) -> None:
        """gate_up becomes its weighted gradient, and dact act; `dweights` [T·K] gets ⟨dact, act⟩."""
        kernels.gated_backward_(gate_up_NO, dact_NI, *weighted, dweights, self.interleaved, self.alpha, self.limit)


def _are_close(found: Tensor, given: Tensor) -> bool:
    return found.shape == given.shape and torch.allclose(found, given, rtol=1e-5, atol=1e-6)
