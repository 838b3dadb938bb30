"""Fused RMS norms: one kernel forward and one backward.

    y = w · x · rstd,   rstd = (mean(x²) + ε)^(-½)      dx = rstd · (w·dy − x · rstd² · mean(w·dy·x))

All of it is computed in float32 and rounded once, as in gpt-oss. Llama's norm rounds x · rstd before it multiplies by
w; in 16 bits the results differ by that rounding, in float32 only by the order of summation. The backward pass keeps x
in its own dtype and rstd [..., 1].

The kernels are registered as custom operators of torch, so that a trace on fake tensors records what a GPU runs.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moetune.compat.torch import apply_function, is_observed
from moetune.compat.transformers import is_rms_norm

_library = torch.library.Library("moetune", "FRAGMENT")
_library.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
_library.define("rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor weight) -> Tensor")


def fuse_norms(model: nn.Module) -> None:
    """Replace the forward method of every RMS norm of a model by the fused one, in place.

    A norm whose weight trains, or has another dtype than its input, still runs transformers' code.
    """
    for module in model.modules():
        if is_rms_norm(module):
            module.forward = partial(_forward, module)


def _forward(norm: Any, x: Tensor) -> Tensor:
    weight = norm._parameters["weight"]
    if weight.requires_grad or weight.dtype != x.dtype:
        return type(norm).forward(norm, x)
    return apply_function(_RmsNorm, x.contiguous(), weight, norm.variance_epsilon)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, rstd = (torch.ops.moetune.rms_norm.default if is_observed(x) else _norm)(x, weight, eps)
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight  # frozen; checkpointing takes as long as a launch for each tensor that is saved
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        backward: Any = torch.ops.moetune.rms_norm_backward.default if is_observed(dy) else _norm_backward
        return backward(dy.contiguous(), *ctx.saved_tensors, ctx.weight), None, None


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    rstd = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * rstd).mul_(weight).to(x.dtype), rstd


def _norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm_backward(dy, x, weight.shape, rstd, weight, [True, False])[0]
    dnormed, x32 = dy.float() * weight, x.float()
    along = torch.linalg.vecdot(dnormed, x32)[..., None] * (rstd**3 / x.shape[-1])
    return dnormed.mul_(rstd).addcmul_(x32, along, value=-1).to(x.dtype)


_library.impl("rms_norm", _norm, "CompositeExplicitAutograd")
_library.impl("rms_norm_backward", _norm_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moetune::rms_norm",
    lambda x, weight, eps: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)),
    lib=_library,
)
torch.library.register_fake("moetune::rms_norm_backward", lambda dy, x, rstd, weight: torch.empty_like(x), lib=_library)
