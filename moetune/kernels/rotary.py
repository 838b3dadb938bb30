"""Operators of rotary position embedding, with or without RMS norms: torch reference and shapes.

For a head x of d numbers, split into halves (a, b), and the halves of cos and sin at its token's position:

    n = w · x · (mean(x²) + ε)^(-½), or n = x without a norm        y = (n_a·cos_a − n_b·sin_a, n_b·cos_b + n_a·sin_b)

A GPU computes all of it in float32 and rounds once; so do torch's operations below if there is a norm. Without one they
are transformers', bit for bit in every dtype, and round after each operation.

Shapes: B rows of S tokens; h heads of queries, or fewer of keys, of size d. Heads are given as [B, h, S, d] and results
have this shape, with memory in the order [B, S, h, d], as projections write them and attention reads them.
"""

import torch
from torch import Tensor

from moetune.kernels.operators import operator

_KERNELS = "moetune.kernels.triton_rotary"


def _empty(heads: Tensor) -> Tensor:
    batch, count, length, size = heads.shape
    return heads.new_empty((batch, length, count, size)).transpose(1, 2)


@operator(lambda q, k, *_: (_empty(q), _empty(k)), kernels=_KERNELS)
def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalize and rotate the heads of queries q [B, h, S, d] and keys k [B, h_kv, S, d]; return two new tensors.

    `cos` and `sin` are [B, S, d], or [1, S, d] if all rows have the same positions. `q_weight` and `k_weight` [d] are
    the weights of the norms, and `eps` their ε; both weights are None for no norm.
    """
    q, k = (_rotated(x, cos, sin, weight, eps) for x, weight in ((q, q_weight), (k, k_weight)))
    return q, k


@operator(lambda dq, dk, *_: (_empty(dq), _empty(dk)), kernels=_KERNELS)
def rotate_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the inputs q and k of `rotate`, given the gradients `dq` and `dk` of its results.

    `q` and `k` are these inputs, or None without norms; the other arguments are those of `rotate`. The norms' weights
    get no gradient.
    """
    dq, dk = (_gradient(*heads, cos, sin, eps) for heads in ((dq, q, q_weight), (dk, k, k_weight)))
    return dq, dk


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x
    if weight is not None:
        wide = x.float()
        wide = (wide * _rstd(wide, eps)).mul_(weight)
    a, b = wide.chunk(2, -1)
    return _dense((wide * cos[:, None]).add_(torch.cat((-b, a), -1).mul_(sin[:, None])).to(x.dtype))


def _gradient(dy: Tensor, x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    wide = dy if weight is None else dy.float()
    a, b = (wide * sin[:, None]).chunk(2, -1)
    dx = (wide * cos[:, None]).add_(torch.cat((b, -a), -1))
    if x is not None and weight is not None:
        wide, dx = x.float(), dx.mul_(weight)
        rstd = _rstd(wide, eps)
        along = (dx * wide).mean(-1, keepdim=True).mul_(rstd**3)
        dx = dx.mul_(rstd).sub_(wide * along)
    return _dense(dx.to(dy.dtype))


def _rstd(wide: Tensor, eps: float) -> Tensor:
    return wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _dense(heads: Tensor) -> Tensor:
    """Return heads [B, h, S, d] with memory in the order [B, S, h, d]; a copy only if needed."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)
