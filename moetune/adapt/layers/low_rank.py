"""A frozen linear layer with LoRA as one autograd function.

y = W·x + b + s·B·(A·x). W is frozen and may be quantized; it is dequantized for each pass. The products with the
factors use the kernels of the experts (kernels/operators.py): one launch forward and two backward, where separate
layers need six and nine. x and A·x are kept for the backward pass.

Shapes: p input features, q output features, r rank, N rows.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from moetune.compat.bitsandbytes import Linear4bit
from moetune.compat.torch import apply_function
from moetune.experts.quantized import QuantizedLinear
from moetune.formats.nf4 import dequantize_nf4
from moetune.formats.rounding import Rounding
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
    kind, bias, A_rp, B_qr = type(base), base._parameters["bias"], A._parameters["weight"], B._parameters["weight"]
    if kind not in (nn.Linear, Linear4bit, QuantizedLinear) or (bias is not None and bias.requires_grad):
        return None
    weight: Any = None if kind is QuantizedLinear else base._parameters["weight"]
    if kind is nn.Linear and weight.requires_grad:  # quantized weights never train
        return None
    for module in (base, A, B):
        if module._forward_hooks or module._forward_pre_hooks:
            return None
    if any(isinstance(tensor, DTensor) for tensor in (weight, A_rp, B_qr)):
        return None
    return apply_function(_AdaptedLinear, bias, x, A_rp, B_qr, scale, partial(dequantized, base), base)


def _alone(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a factor with the axes [experts, parts] of size 1, which the kernels expect: as it is, and
    transposed. Those of a parameter are made once."""
    views: tuple[Tensor, Tensor] | None = None
    if is_parameter := type(factor) is nn.Parameter:
        views = factor.__dict__.get("alone")
    if views is None or views[0].data_ptr() != factor.data_ptr():
        view = factor.data.view(1, 1, *factor.shape)  # a view of the parameter itself would keep it alive for ever
        views = view, view.mT
        if is_parameter:
            factor.__dict__["alone"] = views
    return views


class _AdaptedLinear(torch.autograd.Function):
    """The product with a frozen weight, which `weight(dtype)` returns, plus scale·B·A·x; without `base`, the layer that
    has the weight, that contains scale·B·A already."""

    @staticmethod
    def forward(
        ctx: Any, bias: Any, x: Tensor, A_rp: Tensor, B_qr: Tensor, scale: float, weight: Any, base: Any = None
    ) -> Tensor:
        # parameters, as all else that lives as long, are not saved: checkpointing takes as long as a launch for each
        ctx.factors, ctx.scale, ctx.weight, ctx.adds = (A_rp, B_qr), scale, weight, base is not None
        x_Np = x.reshape(-1, x.shape[-1])
        if base is not None and x_Np.shape[0] <= FEW_ROWS:
            out = base(x)
        else:
            out = nn.functional.linear(x, weight(x.dtype), None if bias is None else bias.to(x.dtype))
        kept = [x]
        if base is not None:
            out_Nq, A, B = out.view(-1, out.shape[-1]), _alone(A_rp), _alone(B_qr)
            kept.append(kernels.low_rank(x_Np, A[0], B[0], out_Nq, out_Nq, None, [x_Np.shape[0]], scale))
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x, *kept), (A_rp, B_qr) = ctx.saved_tensors, ctx.factors
        x_Np, dout_Nq = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
        rows: Any = None, [x_Np.shape[0]]
        dx_Np = dout_Nq @ ctx.weight(dout.dtype) if ctx.needs_input_grad[1] else None
        xA_Nr = kept[0] if kept else kernels.low_rank(x_Np, _alone(A_rp)[0], None, None, None, *rows, 1.0)
        first, second = (None, None) if dx_Np is None or not ctx.adds else (_alone(A_rp)[1], dx_Np)
        dout_B_Nr = kernels.low_rank(dout_Nq, _alone(B_qr)[1], first, second, second, *rows, ctx.scale)
        dA_rp, dB_qr = torch.empty_like(A_rp), torch.empty_like(B_qr)
        gradients = [gradient.view(1, 1, *gradient.shape) for gradient in (dA_rp, dB_qr)]
        kernels.low_rank_gradients_(dout_B_Nr, x_Np, xA_Nr, dout_Nq, *gradients, None, None, *rows, ctx.scale)
        dbias = dout_Nq.sum(0) if ctx.needs_input_grad[0] else None
        return dbias, None if dx_Np is None else dx_Np.view(x.shape), dA_rp, dB_qr, None, None, None


def merged(
    base: Any, x: Tensor, A_rp: Tensor, B_qr: Tensor, scale: float, rounding: Rounding, of_base: float | None
) -> Tensor:
    """Return the output [..., q] of a linear layer with the weight W + scale·B·A, rounded as an export merges it.

    The weight is rounded again in backward. Gradients flow to A and B as if it were not rounded, and to x through the
    rounded weight. `of_base` is as in `Rounding.largest`.
    """

    def merge_(_: int, weight: Tensor) -> Tensor:
        return weight.add_(scale * B_qr.float() @ A_rp.float())

    def plain(_: int) -> Tensor:
        return merge_(0, base.weight.to(torch.float32, copy=True))

    def weight(dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            if isinstance(base, QuantizedLinear):
                return base.stack.merged(slice(0, 1), dtype, rounding, merge_)[0]
            return rounding.rounded(map(plain, range(1)), 1, dtype, of_base=of_base)[0]

    return apply_function(_AdaptedLinear, base.bias, x, A_rp, B_qr, scale, weight)


def dequantized(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight [q, p] of an `nn.Linear`, `Linear4bit` or `QuantizedLinear` in `dtype`. An `nn.Linear` in this
    dtype gives the weight itself, not a copy."""
    if isinstance(linear, QuantizedLinear):
        return linear.stack.matrix(0, dtype)
    if not isinstance(linear, Linear4bit):
        return linear.weight.to(dtype)
    weight: Any = linear._parameters["weight"]
    state: Any = getattr(weight, "quant_state", None) or linear.quant_state
    absmax, stored = getattr(state, "as_stack", (None, ()))
    if absmax is not state.absmax:  # views, which are made once; a moved state has another
        nested: Any = (None, None, None)
        if state.nested:
            nested = state.state2.absmax[None], state.state2.code, state.offset.view(1)
        stored = weight.data.view(1, -1), state.absmax[None], *nested, state.shape.numel()
        state.as_stack = state.absmax, stored
    return dequantize_nf4(*stored, dtype).view(state.shape)
