"""Operators of the experts: a kernel each in Triton on a GPU (triton_kernels.py), torch's own operations elsewhere.

They are operators of the dispatcher, so that a trace counts on fake tensors what a GPU runs: one launch each, and no
memory but the result. Where Triton cannot compile, a GPU runs torch's operations too, after a warning.

Shapes: T tokens, K experts a token, N rows of a group of C experts, sorted by expert; p in and q out features, rank r.
Low-rank factors of a projection come in P parts where gate and up have their own.
`order` [N] are flat positions (token, choice) of the rows; `ends` [C] and `counts` are those of `GroupedGemm`, and one
expert needs no ends. `weights` are all routing weights, flat [T·K].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from moetune.compat.torch import is_observed
from moetune.experts.kernels import INT8_STEP
from moetune.experts.kernels.grouped import library, product_of_groups

BLOCK = 64  # weights that share one NF4 scale
NESTED_BLOCK = 256  # scales that share one second-level scale, under double quantization
MX_BLOCK = 32  # weights that share one MXFP4 scale
MXFP4_AT_ONCE = 1 << 24  # weights whose bytes are looked up at once: 32 MiB of indices
INT8_AT_ONCE = 1 << 22  # weights that are scaled in float32 at once, to int8 or MXFP4: 16 MiB
REFERENCES: dict[str, Callable[..., Any]] = {}
"""Operator -> the same with torch's operations."""


@cache
def on_gpu() -> ModuleType | None:
    """Return the kernels in Triton, if they can be compiled here."""
    try:
        from moetune.experts.kernels import triton_kernels

        triton_kernels.triton.runtime.driver.active  # noqa: B018  compiles its own access to the driver
    except Exception as error:  # whatever a compiler, a linker or the driver has said
        warnings.warn(
            f"Triton does not work here ({type(error).__name__}: {error}), so experts run slower, and may take more "
            "memory than predicted; it needs a C compiler (gcc) and Python's headers",
            stacklevel=2,
        )
        return None
    return triton_kernels


def _operator(fake: Callable[..., Any] = lambda *_: None, *, mutates: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Define an operator by a function that computes with torch's operations. On a GPU the kernel of its name runs.

    Args:
        fake: what it returns, without values.
        mutates: arguments that it writes to.
    """

    def define(reference: Callable[..., Any]) -> Any:
        name = reference.__name__

        def run(*args: Any) -> Any:
            kernels = on_gpu() if args[0].is_cuda else None
            return reference(*args) if kernels is None else getattr(kernels, name)(*args)

        library.define(torch.library.infer_schema(reference, mutates_args=mutates, op_name=name))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moetune::{name}", fake, lib=library)
        operator = getattr(torch.ops.moetune, name).default
        REFERENCES[name] = reference
        # Unobserved, the dispatcher takes as long as a launch and adds nothing: autograd records nothing here.
        return lambda *args: (operator if is_observed(args[0]) else run)(*args)

    return define


@_operator(
    lambda data, absmax, nested, code, offset, weights, dtype: data.new_empty((len(data), weights), dtype=dtype),
)
def dequantize_nf4(
    data: Tensor,
    absmax: Tensor,
    nested: Tensor | None,
    code: Tensor | None,
    offset: Tensor | None,
    weights: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize matrices of `weights` elements each: [n, weights], bit for bit as bitsandbytes does one by one. They
    are dequantized together if each consists of whole blocks, and so do their scales."""
    ops, count = torch.ops.bitsandbytes, len(data)
    if nested is not None and code is not None and offset is not None:
        together = 1 if absmax.shape[1] % NESTED_BLOCK == 0 else count
        absmax = _joined(
            ops.dequantize_blockwise(scales.flatten(), of_scales.flatten(), code, NESTED_BLOCK, torch.float32)
            for scales, of_scales in zip(absmax.chunk(together), nested.chunk(together), strict=True)
        ).view(absmax.shape)
        absmax.add_(offset[:, None])
    # A row that is no whole number of blocks is dequantized alone: docs/reference/upstream.md has bitsandbytes' bug.
    together = 1 if weights % BLOCK == 0 else count
    return _joined(
        ops.dequantize_4bit(part.view(-1, 1), scales.flatten(), BLOCK, "nf4", (len(part), weights), dtype)
        for part, scales in zip(data.chunk(together), absmax.chunk(together), strict=True)
    )


def _joined(parts: Iterable[Tensor]) -> Tensor:
    first, *others = parts
    return torch.cat([first, *others]) if others else first


def int8_slices(shape: Sequence[int]) -> list[slice]:
    """Slices of the rows [R, C] of an int8 matrix that are scaled at once: at most `INT8_AT_ONCE` weights or one
    row."""
    rows = max(1, INT8_AT_ONCE // shape[1])
    return [slice(first, first + rows) for first in range(0, shape[0], rows)]


@_operator(lambda data, absmax, dtype: torch.empty_like(data, dtype=dtype))
def dequantize_int8(data: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize rows [n, C] with a scale each [n], bit for bit as bitsandbytes' `int8_vectorwise_dequant`. torch's
    operations take at most 16 MiB beside the result, bitsandbytes' 8 bytes a weight."""
    out = torch.empty_like(data, dtype=dtype)
    if dtype == torch.float32:
        return torch.mul(data, absmax[:, None], out=out).mul_(INT8_STEP)
    slices = int8_slices(data.shape)
    wide = torch.empty_like(out[slices[0]], dtype=torch.float32)
    for rows in slices:
        part = out[rows]
        part.copy_(torch.mul(data[rows], absmax[rows, None], out=wide[: len(part)]).mul_(INT8_STEP))
    return out


@_operator(lambda data, scales, pairs, dtype: data.new_empty(2 * len(data), dtype=dtype))
def dequantize_mxfp4(data: Tensor, scales: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks of 32 weights, 16 bytes each, with an exponent per block: [weights]. `pairs` [256, 2] are the
    two values of each byte. Bit for bit transformers' `convert_moe_packed_tensors`, without its transposition.

    torch's operations look two weights up at once, by their byte, and take at most 2 bytes a weight of `MXFP4_AT_ONCE`
    weights beside the result."""
    as_one = {2: torch.int32, 4: torch.int64}[dtype.itemsize]
    pair = pairs.to(dtype).view(as_one).flatten()
    out = torch.empty(2 * len(data), dtype=dtype, device=data.device)
    of_pairs, of_blocks = out.view(as_one), out.view(-1, MX_BLOCK)
    exponents = scales.to(torch.int32).sub_(127)[:, None]
    for first in range(0, len(data), MXFP4_AT_ONCE // 2):
        bytes_ = slice(first, first + MXFP4_AT_ONCE // 2)
        torch.index_select(pair, 0, data[bytes_].to(torch.int32), out=of_pairs[bytes_])
        blocks = slice(2 * first // MX_BLOCK, 2 * bytes_.stop // MX_BLOCK)
        torch.ldexp(of_blocks[blocks], exponents[blocks], out=of_blocks[blocks])
    return out


@_operator(lambda gate_up, *_: gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2)))
def gated(gate_up: Tensor, interleaved: bool, alpha: float, limit: float) -> Tensor:
    """SwiGLU of rows [N, 2I], gate and up concatenated or interleaved: silu(gate)·up, [N, I]. With a `limit` other than
    0 that of gpt-oss: both clamped, up plus 1, and a sigmoid of alpha·gate."""
    gate, up = _halves(gate_up, interleaved)
    if not limit:
        return silu(gate).mul_(up)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


@_operator(mutates=("gate_up", "dact", "dweights"))
def gated_backward_(
    gate_up: Tensor,
    dact: Tensor,
    weights: Tensor,
    order: Tensor,
    dweights: Tensor | None,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> None:
    """Backward of `gated`, in place. `dact` is the gradient before weighting and becomes act; gate_up becomes its
    weighted gradient; `dweights` [T·K] gets ⟨dact, act⟩ of these rows."""
    gate, up = _halves(gate_up, interleaved)
    act = gated(gate_up, interleaved, alpha, limit)
    if dweights is not None:
        dweights[order] = torch.einsum("ni,ni->n", dact, act).to(dweights.dtype)
    dact.mul_(weights[order, None].to(dact.dtype))
    if not limit:
        of_gate = torch.ops.aten.silu_backward(dact * up, gate)
        up.copy_(silu(gate).mul_(dact))
    else:
        inside_gate, inside_up = gate <= limit, up.abs() <= limit
        gate_, sigmoid = gate.clamp(max=limit), torch.sigmoid(gate.clamp(max=limit) * alpha)
        of_gate = sigmoid * (1 + gate_ * alpha * (1 - sigmoid)) * (up.clamp(-limit, limit) + 1) * dact * inside_gate
        up.copy_(gate_ * sigmoid * dact * inside_up)
    gate.copy_(of_gate)
    dact.copy_(act)


def _halves(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    size = gate_up.shape[1] // 2
    return (gate_up[:, ::2], gate_up[:, 1::2]) if interleaved else (gate_up[:, :size], gate_up[:, size:])


@_operator(lambda x, order, *_: x.new_empty((len(order), x.shape[1])), mutates=("inverse",))
def gather_rows(x: Tensor, order: Tensor, top_k: int, inverse: Tensor | None) -> Tensor:
    """Return the tokens' rows [T, H] in an order: [N, H]. Write the row of each position to `inverse` [T·K], int32."""
    if inverse is not None:
        inverse[order] = torch.arange(len(order), dtype=inverse.dtype, device=order.device)
    return x.index_select(0, order // top_k)


@_operator(mutates=("out",))
def sum_rows_(out: Tensor, rows: Tensor, inverse: Tensor, weights: Tensor | None) -> None:
    """Write the weighted sum of each token's K rows, found by `inverse` and summed in their order, to out [T, H]."""
    found = rows.index_select(0, inverse)
    if weights is not None:
        found.mul_(weights[:, None].to(found.dtype))
    if len(out):
        torch.sum(found.view(len(out), -1, out.shape[1]), 1, out=out)


@_operator(mutates=("out", "rows"))
def add_rows_(out: Tensor, rows: Tensor, order: Tensor, top_k: int, weights: Tensor | None) -> None:
    """Add weighted rows, at most one of each token, to out [T, H]. Overwrites the rows."""
    if weights is not None:
        rows.mul_(weights[order, None].to(rows.dtype))
    out.index_add_(0, order // top_k, rows)


@_operator(lambda x, first, *_: x.new_empty((len(x), *first.shape[1:3])), mutates=("out",))
def low_rank(
    x: Tensor,
    first: Tensor,
    second: Tensor | None,
    base: Tensor | None,
    out: Tensor | None,
    ends: Tensor | None,
    counts: Sequence[int],
    scale: float,
) -> Tensor:
    """Return x·firstᵀ with the factor [C, P, r, p] of each row's expert, in P parts: [N, P, r]. x is [N, p], the same
    for all parts, or [N, P, p]. With a `second` [C, P, q, r], `out` becomes base + scale · narrow·secondᵀ: [N, P, q],
    or [N, q] with the sum of the parts; it may be the base itself. Factors are rounded to x's dtype."""
    parts, groups = range(first.shape[1]), (ends, counts)
    first = first.to(x.dtype)
    if x.dim() == 2:
        narrow = product_of_groups(x, first.flatten(1, 2).mT, *groups).unflatten(1, first.shape[1:3])
    else:
        narrow = torch.stack([product_of_groups(x[:, part], first[:, part].mT, *groups) for part in parts], 1)
    if second is None or base is None or out is None:
        return narrow
    second = second.to(x.dtype)
    if out.dim() == 2:
        _add_product(base, narrow.flatten(1), second.transpose(1, 2).flatten(2), out, *groups, scale)
    else:
        for part in parts:
            _add_product(base[:, part], narrow[:, part], second[:, part], out[:, part], *groups, scale)
    return narrow


def _add_product(
    base: Tensor, rows: Tensor, factors: Tensor, out: Tensor, ends: Tensor | None, counts: Sequence[int], scale: float
) -> None:
    """out = base + scale · rows·factorsᵀ, of rows [N, p] and factors [C, q, p]."""
    if ends is None:
        torch.addmm(base, rows, factors[0].T, alpha=scale, out=out)
    else:
        torch.add(base, product_of_groups(rows, factors.mT, ends, counts), alpha=scale, out=out)


@_operator(mutates=("of_first", "of_second"))
def low_rank_gradients_(
    narrow_out: Tensor,
    x: Tensor,
    narrow_in: Tensor,
    dout: Tensor,
    of_first: Tensor,
    of_second: Tensor,
    weights: Tensor | None,
    order: Tensor | None,
    ends: Tensor | None,
    counts: Sequence[int],
    scale: float,
) -> None:
    """Write the gradients of factors [C, P, r, p] and [C, P, q, r]: scale · Σ w·narrow_outᵀ·x and
    scale · Σ w·doutᵀ·narrow_in over each expert's rows; zeros for one without. `narrow_out` is dout·second, `narrow_in`
    x·firstᵀ, both [N, P, r], and dout [N, P, q], or [N, q] of one part."""
    factor: Tensor | float = scale
    if weights is not None and order is not None:
        factor = weights[order, None, None].to(x.dtype) * scale
    of_first.copy_(product_of_groups((narrow_out * factor).flatten(1).T, x, ends, counts).view(of_first.shape))
    dout, narrow_in = dout.view(len(dout), of_second.shape[1], -1) if dout.dim() == 2 else dout, narrow_in * factor
    for part in range(of_second.shape[1]):
        of_second[:, part].copy_(product_of_groups(dout[:, part].T, narrow_in[:, part], ends, counts))
