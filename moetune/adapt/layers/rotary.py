"""Rotary position embedding with norms of queries and keys: one kernel each way.

transformers' code launches five kernels to rotate queries, five to rotate keys and nine each for their gradients, all
of which read and write whole tensors. kernels/rotary.py has the formulas. The backward pass keeps the queries
and keys before their norms, and nothing if they have none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from moetune.compat.torch import apply_function
from moetune.compat.transformers import calls_rotary, forward_with_rotary, is_rms_norm, norms_heads
from moetune.kernels import rotary as kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Norms:
    """The RMS norms of an attention layer's queries and keys, whose results are rotated and have no other use. `q` and
    `k` are the modules, `plain` their own forward methods."""

    q: Any
    k: Any
    plain: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]

    def are_fused(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel that rotates heads in `dtype` also computes their norms.

        If one of the weights trains, or has another dtype, both modules compute their norms themselves.
        """
        weights = self.q.weight, self.k.weight
        return not any(weight.requires_grad or weight.dtype != dtype for weight in weights)


def fuse_rotary(model: nn.Module) -> None:
    """Make the attention layers of a model rotate queries and keys, and compute their norms, by one kernel, in place.

    This concerns layers that call Llama's `apply_rotary_pos_emb` by its code in transformers; norms are included where
    attention has the code of Qwen3-MoE. Other layers stay as they are.
    """
    for module in list(model.modules()):
        if not calls_rotary(module):
            continue
        norms = _norms_of(module)
        # `copy.deepcopy` copies what a `partial` holds: a copied layer has its own norms
        module.forward = partial(forward_with_rotary, module, partial(_rotate, norms))
        if norms is not None:
            for norm, plain in zip((norms.q, norms.k), norms.plain, strict=True):
                norm.forward = partial(_unless_fused, norms, plain)


def _norms_of(attention: Any) -> _Norms | None:
    if not norms_heads(attention):
        return None
    q, k = attention.q_norm, attention.k_norm
    if not (is_rms_norm(q) and is_rms_norm(k) and q.variance_epsilon == k.variance_epsilon):
        return None
    return _Norms(q, k, (q.forward, k.forward))


def _unless_fused(norms: _Norms, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Forward method of a norm of heads: the norm's own (`plain`), or `x` unchanged if `_rotate` will normalize it."""
    return x if norms.are_fused(x.dtype) else plain(x)


def _rotate(
    norms: _Norms | None,
    plain: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by one kernel, which also computes their norms if there are any (`norms`) that `are_fused`.

    Of tensors or arguments that do not fit the kernel, compute such norms by `norms.plain`, and rotate by `plain`,
    transformers' `apply_rotary_pos_emb`.
    """
    is_normed = norms is not None and norms.are_fused(q.dtype)
    if not args and not kwargs and _fits(q, k, cos, sin):
        weights, eps = (None, None), 0.0
        if norms is not None and is_normed:
            weights, eps = (norms.q.weight, norms.k.weight), norms.q.variance_epsilon
        return apply_function(_Rotate, q, k, cos, sin, *weights, eps)
    if norms is not None and is_normed:
        q, k = (norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in zip(norms.plain, (q, k), strict=True))
    return plain(q, k, cos, sin, *args, **kwargs)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether q and k are heads [B, h, S, d], d even, and cos and sin [B or 1, S, d], all of one dtype."""
    if any(isinstance(tensor, DTensor) for tensor in (q, k)) or q.dim() != 4 or k.dim() != 4:
        return False
    shape = (q.shape[0], *q.shape[2:])
    return (
        q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.dtype in _DTYPES
        and shape == (k.shape[0], *k.shape[2:])
        and cos.shape == sin.shape in (shape, (1, *shape[1:]))
        and q.shape[-1] % 2 == 0
    )


class _Rotate(torch.autograd.Function):
    """The operator `rotate`, with its arguments."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        ctx.given = given  # weights that train are not fused; all layers share cos and sin, so they need not be saved
        ctx.save_for_backward(*((None, None) if given[2] is None else (q, k)))
        return kernels.rotate(q, k, *given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *kernels.rotate_backward(dq, dk, *ctx.saved_tensors, *ctx.given), None, None, None, None, None
