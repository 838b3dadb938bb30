"""A frozen linear layer with LoRA as one autograd function: y = W·x + b + s·B·(A·x), forward and backward.

W is frozen and may be quantized; it is dequantized for each pass. The products with the factors use the kernels of the
experts (kernels/operators.py): one launch forward and two backward, where separate layers need six and nine. x
and A·x are kept for the backward pass.

Shapes: p input features, q output features, r rank, N rows.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from moetune.compat.bitsandbytes import Linear4bit
from moetune.experts.quantized import QuantizedLinear
from moetune.formats.nf4 import dequantize_nf4
from moetune.kernels import operators as kernels

FEW_ROWS = 1536
"""Maximum number of rows for which the base layer is called instead of dequantizing its weight here.

bitsandbytes may then multiply 4-bit weights directly; for more rows it would dequantize them, in three launches.
"""


def adapted(base: nn.Module, x: Tensor, A: nn.Module, B: nn.Module, scale: float) -> Tensor | None:
    """Return base(x) + scale·B(A(x)), [..., q], as one autograd function; gradients flow to x, A and B.

    Returns None if the layers must be run separately: `base` is not a plain, 4-bit or quantized linear layer, or has a
    parameter that trains; a weight is a DTensor (as under tensor parallelism); or a layer has forward hooks (which
    gather its weights, under FSDP2 and ZeRO-3).

    Args:
        x: input [..., p].
        A, B: linear layers with the factors [r, p] and [q, r].
        scale: LoRA's factor s.
    """
    kind, bias, weights = type(base), base.bias, [A.weight, B.weight]
    if kind not in (nn.Linear, Linear4bit, QuantizedLinear) or (bias is not None and bias.requires_grad):
        return None
    if kind is not QuantizedLinear:  # whose weight never trains
        weights.append(base.weight)
        if weights[2].requires_grad:
            return None
    for module in (base, A, B):
        if module._forward_hooks or module._forward_pre_hooks:
            return None
    if any(isinstance(weight, DTensor) for weight in weights):
        return None
    return _AdaptedLinear.apply(base, x, weights[0], weights[1], scale)


def _alone(factor: Tensor) -> Tensor:
    """Return a view of a factor with the axes [experts, parts] of size 1, which the kernels expect."""
    return factor.view(1, 1, *factor.shape)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Any, x: Tensor, A_rp: Tensor, B_qr: Tensor, scale: float) -> Tensor:
        # parameters, as all else that lives as long, are not saved: checkpointing takes as long as a launch for each
        ctx.base, ctx.factors, ctx.scale = base, (A_rp, B_qr), scale
        x_Np = x.flatten(0, -2)
        if x_Np.shape[0] <= FEW_ROWS:
            out = base(x)
        else:
            bias = None if base.bias is None else base.bias.to(x.dtype)
            out = nn.functional.linear(x, dequantized(base, x.dtype), bias)
        out_Nq = out.flatten(0, -2)
        xA_Nr = kernels.low_rank(x_Np, _alone(A_rp), _alone(B_qr), out_Nq, out_Nq, None, [len(x_Np)], scale)
        ctx.save_for_backward(x, xA_Nr)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x, xA_Nr), (A_rp, B_qr) = ctx.saved_tensors, ctx.factors
        x_Np, dout_Nq = x.flatten(0, -2), dout.flatten(0, -2)
        rows: Any = None, [len(x_Np)]
        dx_Np = dout_Nq @ dequantized(ctx.base, dout.dtype) if ctx.needs_input_grad[1] else None
        first, second = (None, None) if dx_Np is None else (_alone(A_rp).mT, dx_Np)
        dout_B_Nr = kernels.low_rank(dout_Nq, _alone(B_qr).mT, first, second, second, *rows, ctx.scale)
        dA_rp, dB_qr = torch.empty_like(A_rp), torch.empty_like(B_qr)
        kernels.low_rank_gradients_(
            dout_B_Nr, x_Np, xA_Nr, dout_Nq, _alone(dA_rp), _alone(dB_qr), None, None, *rows, ctx.scale
        )
        return None, None if dx_Np is None else dx_Np.view(x.shape), dA_rp, dB_qr, None


def dequantized(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight [q, p] of an `nn.Linear`, `Linear4bit` or `QuantizedLinear` in `dtype`. An `nn.Linear` in this
    dtype gives the weight itself, not a copy."""
    if isinstance(linear, QuantizedLinear):
        return linear.stack.matrix(0, dtype)
    if not isinstance(linear, Linear4bit):
        return linear.weight.to(dtype)
    weight = linear.weight
    state: Any = getattr(weight, "quant_state", None) or linear.quant_state
    device, stored = getattr(state, "as_stack", (None, ()))
    if device != weight.device:  # views, which are made once for each device
        nested: Any = (None, None, None)
        if state.nested:
            nested = state.state2.absmax[None], state.state2.code, state.offset.view(1)
        stored = weight.data.view(1, -1), state.absmax[None], *nested, state.shape.numel()
        state.as_stack = weight.device, stored
    return dequantize_nf4(*stored, dtype).view(state.shape)
