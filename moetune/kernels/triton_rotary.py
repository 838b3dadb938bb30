"""Triton kernels of the operators in rotary.py; one launch for queries and keys.

Each program rotates a fixed number of heads, about `PAIRS` pairs of numbers in all: consecutive heads of a token, then
those of the next token. Import this file only with a GPU and Triton. `PAIRS` was chosen without timing it on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moetune.kernels.launch import ceil_div, kernel, next_power_of_2

PAIRS = 1024  # pairs of numbers that a program rotates


@triton.jit
def _halves(at, column, half):
    """Load the halves (a, b) of heads, or of a row of cos or sin, of 2 · `half` numbers each, in float32.

    `at` points at the first number of each head; `column` [1, HALF] counts the numbers of a half, and those from `half`
    on are loaded as 0.
    """
    inside = column < half
    a = tl.load(at + column, mask=inside, other=0).to(tl.float32)
    return a, tl.load(at + half + column, mask=inside, other=0).to(tl.float32)


@triton.jit
def _heads(
    x, dy, out, weight, cos, sin, tile, tokens, length, positions, heads, half,
    x_row, x_token, x_head, dy_row, dy_token, dy_head, eps,
    NORMED: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of HEADS heads of x, or with BACKWARD compute x's gradient from dy; store the result in `out`.

    `out`, contiguous, has the heads of all tokens one after the other; tile number `tile` starts at head tile · HEADS.
    There are `tokens` = B·S tokens in rows of `length` = S, with `heads` heads of 2 · `half` numbers each; `cos` and
    `sin` have `positions` rows, B·S or S. Strides of x and dy are those of row, token and head.
    """
    number = tile * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (number < tokens * heads) & (tl.arange(0, HALF) < half)[None, :]
    number = tl.minimum(number, tokens * heads - 1)
    token, head = number // heads, number % heads
    row, in_row = (token // length).to(tl.int64), (token % length).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    position = (token % positions).to(tl.int64) * 2 * half
    cos_a, cos_b = _halves(cos + position, column, half)
    sin_a, sin_b = _halves(sin + position, column, half)
    if NORMED or not BACKWARD:
        a, b = _halves(x + row * x_row + in_row * x_token + head.to(tl.int64) * x_head, column, half)
    if NORMED:
        rstd = tl.rsqrt(tl.sum(a * a + b * b, 1)[:, None] / (2 * half) + eps)
        weight_a, weight_b = _halves(weight, column, half)
    if BACKWARD:
        dy_a, dy_b = _halves(dy + row * dy_row + in_row * dy_token + head.to(tl.int64) * dy_head, column, half)
        to_a, to_b = dy_a * cos_a + dy_b * sin_b, dy_b * cos_b - dy_a * sin_a
        if NORMED:
            to_a, to_b = to_a * weight_a, to_b * weight_b
            along = tl.sum(to_a * a + to_b * b, 1)[:, None] / (2 * half) * rstd * rstd * rstd
            to_a, to_b = to_a * rstd - a * along, to_b * rstd - b * along
    else:
        if NORMED:
            a, b = a * rstd * weight_a, b * rstd * weight_b
        to_a, to_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    to = out + number.to(tl.int64) * 2 * half + column
    tl.store(to, to_a.to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, to_b.to(out.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["tokens", "length", "positions", "of_q"])
def _rotate(
    q, k, dq, dk, q_out, k_out, q_weight, k_weight, cos, sin, tokens, length, positions, of_q, q_heads, k_heads, half,
    q_row, q_token, q_head, k_row, k_token, k_head, dq_row, dq_token, dq_head, dk_row, dk_token, dk_head, eps,
    NORMED: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < of_q:
        _heads(
            q, dq, q_out, q_weight, cos, sin, tile, tokens, length, positions, q_heads, half,
            q_row, q_token, q_head, dq_row, dq_token, dq_head, eps, NORMED, BACKWARD, HEADS, HALF,
        )  # fmt: skip
    else:
        _heads(
            k, dk, k_out, k_weight, cos, sin, tile - of_q, tokens, length, positions, k_heads, half,
            k_row, k_token, k_head, dk_row, dk_token, dk_head, eps, NORMED, BACKWARD, HEADS, HALF,
        )  # fmt: skip


def _launch(q, k, dq, dk, cos, sin, q_weight, k_weight, eps, *, backward):
    q, k, dq, dk = map(_along_heads, (q, k, dq, dk))
    batch, q_heads, length, size = q.shape
    outs = [x.new_empty((batch, length, x.shape[1], size)) for x in (q, k)]
    tokens, half, normed = batch * length, size // 2, q_weight is not None
    padded = next_power_of_2(half)
    each = max(1, PAIRS // padded)
    of_q, of_k = (ceil_div(out.numel(), size * each) for out in outs)
    weights = (q_weight, k_weight) if normed else (cos, cos)
    cos, sin = cos.contiguous(), sin.contiguous()
    _rotate[(of_q + of_k,)](
        q, k, dq, dk, *outs, *weights, cos, sin, tokens, length, cos.numel() // size, of_q, q_heads, k.shape[1], half,
        *(x.stride(dim) for x in (q, k, dq, dk) for dim in (0, 2, 1)), float(eps),
        NORMED=normed, BACKWARD=backward, HEADS=each, HALF=padded,
    )  # fmt: skip
    return tuple(out.transpose(1, 2) for out in outs)


def _along_heads(x: Tensor) -> Tensor:
    """Return heads [B, h, S, d] whose last dimension is contiguous; a copy only if needed."""
    return x if x.stride(3) == 1 else x.contiguous()


def rotate(q, k, cos, sin, q_weight, k_weight, eps):
    return _launch(q, k, q, k, cos, sin, q_weight, k_weight, eps, backward=False)


def rotate_backward(dq, dk, q, k, cos, sin, q_weight, k_weight, eps):
    q, k = (dq, dk) if q is None else (q, k)
    return _launch(q, k, dq, dk, cos, sin, q_weight, k_weight, eps, backward=True)
