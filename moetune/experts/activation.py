"""The experts' activation functions, forward and backward, by a GPU kernel or autograd.

Rows of gate_up [N, O] become rows of act [N, I], where I is the experts' intermediate size and O is 2I, or I without
gate. Two functions have a kernel:

| name | formula |
|---|---|
| SwiGLU | silu(gate) · up |
| clamped SwiGLU (gpt-oss) | g = min(gate, limit); g · σ(alpha·g) · (clamp(up, ±limit) + 1) |

`recognize` reads `alpha` and `limit` from the model's experts module and compares results over the range of float32.
Any other function runs as the model defines it, with autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from moetune.compat.torch import unset_fake_temporarily
from moetune.experts.projection import RowWeights
from moetune.kernels import operators as kernels
from moetune.models.moe import ExpertShape


@dataclass(frozen=True)
class SwiGLU:
    """SwiGLU with a GPU kernel. A `limit` other than 0 selects gpt-oss's clamped variant, which alone uses `alpha`.

    `interleaved`: gate and up alternate in the columns of gate_up; otherwise all gate columns come first.

    `forward` records nothing for autograd, and `backward` recomputes.
    """

    interleaved: bool
    alpha: float = 1.0
    limit: float = 0.0

    def forward(self, gate_up_NO: Tensor) -> Tensor:
        """Return act rows [N, I] of gate_up rows [N, O]; a new tensor."""
        act_NI: Tensor = kernels.gated(gate_up_NO, self.interleaved, self.alpha, self.limit)
        return act_NI

    def backward(
        self, gate_up_NO: Tensor, dact_NI: Tensor, weights: RowWeights, dweights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return act [N, I], without routing weights, and the gradient of gate_up [N, O], multiplied by them.

        `dact_NI` is the gradient of act before it is multiplied by the routing weights. If `dweights` [T·K] (T tokens,
        K experts each) is not None, ⟨dact, act⟩ of each row is written to it at token · K + k: the gradient of the
        row's routing weight. Both input tensors may be overwritten or returned; the caller must not use them
        afterwards.
        """
        kernels.gated_backward_(gate_up_NO, dact_NI, *weights, dweights, self.interleaved, self.alpha, self.limit)
        return dact_NI, gate_up_NO


@dataclass(frozen=True)
class AutogradActivation:
    """Any differentiable function [N, O] -> [N, I] without parameters; backward runs it again under autograd.

    The methods are those of `SwiGLU`.
    """

    function: Callable[[Tensor], Tensor]

    def forward(self, gate_up_NO: Tensor) -> Tensor:
        return self.function(gate_up_NO)

    def backward(
        self, gate_up_NO: Tensor, dact_NI: Tensor, weights: RowWeights, dweights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        gate_up_NO.requires_grad_()
        with torch.enable_grad():
            act_NI = self.function(gate_up_NO)
        edge, act_NI = get_gradient_edge(act_NI), act_NI.detach()  # the backward graph stays alive without the rows
        if dweights is not None:
            dweights.index_copy_(0, weights.order, torch.einsum("ni,ni->n", dact_NI, act_NI).to(dweights.dtype))
        (dgate_up_NO,) = torch.autograd.grad(edge, gate_up_NO, dact_NI.mul_(weights.column(dact_NI.dtype)))
        return act_NI, dgate_up_NO


Activation = SwiGLU | AutogradActivation


def recognize(function: Callable[[Tensor], Tensor], shape: ExpertShape) -> Activation:
    """Return `SwiGLU` if it computes the same as a model's activation function, else `AutogradActivation`.

    `function` takes gate_up rows [N, O] to act rows [N, I]. `alpha` and `limit`, also named `swiglu_alpha` and
    `swiglu_limit`, are read from the object that it is bound to. Results are compared on the CPU in float32, within
    1e-5 relative plus 1e-6 absolute.
    """
    if not shape.has_gate:
        return AutogradActivation(function)
    constants: dict[str, float] = {}
    for name in ("alpha", "limit"):
        for key in (name, f"swiglu_{name}"):
            if (value := getattr(getattr(function, "__self__", None), key, None)) is not None:
                constants[name] = float(value)
    swiglu = SwiGLU(not shape.is_concatenated, **constants)
    with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
        # pairs (gate, up) [N, 2, I]: both signs, magnitudes 0 and 2⁻⁸ to 2¹²⁷
        sizes = 2.0 ** torch.arange(-8, 128, 3)
        values = torch.cat([-sizes, torch.zeros(1), sizes])
        pairs = torch.cartesian_prod(values, values)
        pairs = torch.cat([pairs, pairs.new_zeros(-len(pairs) % shape.intermediate, 2)])
        pairs = pairs.view(-1, shape.intermediate, 2).mT
        rows = pairs.transpose(-1, -2).flatten(1) if swiglu.interleaved else pairs.flatten(1)
        ours, theirs = swiglu.forward(rows), function(rows.clone())
        is_same = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return swiglu if is_same else AutogradActivation(function)
