"""Triton kernels of the operators in operators.py.

Each function without a leading underscore implements the operator of that name and takes its arguments; operators.py
documents them. Import this file only with a GPU and Triton. Sums run in float32 in a fixed order, so that two runs give
the same bits. Programs of grouped products find their tile from the ends of the experts' rows on the device, without
the host.

Not measured on a GPU: block sizes are what fits into the shared memory and registers of compute capability 8.6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moetune.experts.kernels import INT8_STEP
from moetune.experts.kernels.launch import kernel

BLOCKS_OF_64 = 64  # NF4 blocks of 64 weights per program
COLUMNS = 1024  # columns of a program's block, times 2 or 4 in some kernels
ROWS = 32  # rows of a tile of a product


def _next(number: int) -> int:
    """Return the smallest power of two that is at least `number`.

    `triton.next_power_of_2` takes the host ten times as long.
    """
    return 1 << max(0, number - 1).bit_length()


def _ratio(number: int, size: int) -> int:
    """Return number / size, rounded up."""
    return -(-number // size)


# --- NF4 ----------------------------------------------------------------------------------------------------------


@triton.jit
def _level(code):
    """Return the NF4 value of a 4-bit code (bitsandbytes/functional.py: get_4bit_type)."""
    low = (code & 1) == 1
    a = tl.where(low, -0.6961928009986877, -1.0)
    b = tl.where(low, -0.39491748809814453, -0.5250730514526367)
    c = tl.where(low, -0.18477343022823334, -0.28444138169288635)
    d = tl.where(low, 0.0, -0.09105003625154495)
    e = tl.where(low, 0.16093020141124725, 0.07958029955625534)
    f = tl.where(low, 0.33791524171829224, 0.24611230194568634)
    g = tl.where(low, 0.5626170039176941, 0.44070982933044434)
    h = tl.where(low, 1.0, 0.7229568362236023)
    second, third = (code & 2) == 2, (code & 4) == 4
    negative = tl.where(third, tl.where(second, d, c), tl.where(second, b, a))
    positive = tl.where(third, tl.where(second, h, g), tl.where(second, f, e))
    return tl.where((code & 8) == 8, positive, negative)


@triton.jit
def _looked_up(table, pairs):
    """Return the values [..., 2] of pairs of 4-bit codes, the high code first.

    The table [16] lies in shared memory, where values of one table never conflict: each is in a bank of its own.
    """
    of_high = tl.gather(table, tl.reshape(pairs >> 4, (pairs.numel,)), 0)
    of_low = tl.gather(table, tl.reshape(pairs & 15, (pairs.numel,)), 0)
    return tl.join(tl.reshape(of_high, pairs.shape), tl.reshape(of_low, pairs.shape))


@kernel()
def _dequantize_nf4(
    data, absmax, nested, code, offset, out, weights, bytes_, blocks, nests, NESTED: tl.constexpr, BLOCKS: tl.constexpr
):
    piece = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    pairs = tl.load(data + piece * bytes_ + byte, mask=byte < bytes_, other=0).to(tl.int32)
    scale = tl.load(absmax + piece * blocks + block, mask=block < blocks, other=0)
    if NESTED:
        of_scales = tl.load(nested + piece * nests + block // 256, mask=block < blocks, other=0)
        scale = tl.load(code + scale.to(tl.int32)) * of_scales + tl.load(offset + piece)
    levels = tl.reshape(_looked_up(_level(tl.arange(0, 16)), pairs), (BLOCKS, 64))
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    value = (levels * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + piece * weights + at, value, mask=at < weights)


def dequantize_nf4(data, absmax, nested, code, offset, weights, dtype):
    out = data.new_empty(data.shape[0], weights, dtype=dtype)
    blocks, nests = absmax.shape[1], 0 if nested is None else nested.shape[1]
    grid = (_ratio(blocks, BLOCKS_OF_64), data.shape[0])
    is_nested = nested is not None
    of_nested = (nested, code, offset) if is_nested else (absmax, absmax, absmax)
    # without fused multiply-add, scales are bit for bit those of bitsandbytes
    _dequantize_nf4[grid](
        data, absmax, *of_nested, out, weights, data.shape[1], blocks, nests, NESTED=is_nested, BLOCKS=BLOCKS_OF_64,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


# --- int8 and MXFP4 -----------------------------------------------------------------------------------------------


@kernel()
def _dequantize_int8(data, absmax, out, size, per_step, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    level = tl.load(data + row * size + column, mask=inside, other=0).to(tl.float32)
    value = level * tl.load(absmax + row) * per_step
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


def dequantize_int8(data, absmax, dtype):
    out = torch.empty_like(data, dtype=dtype)
    rows, size = data.shape
    columns = min(4 * COLUMNS, _next(size))
    if rows:
        _dequantize_int8[(rows, _ratio(size, columns))](data, absmax, out, size, INT8_STEP, COLUMNS=columns)
    return out


@triton.jit
def _power_of_two(exponent):
    """Return 2**exponent for an integer exponent from -126 to 127, built from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code):
    """Return the value of a 4-bit E2M1 code: 1 sign, 2 exponent, 1 mantissa bit (OCP Microscaling Formats 1.0,
    5.3.3)."""
    exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
    value = tl.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * _power_of_two(exponent - 1))
    return tl.where((code & 8) == 8, -value, value)


@kernel()
def _dequantize_mxfp4(data, scales, out, bytes_, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = byte < bytes_
    pair = tl.load(data + byte, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(scales + byte // 16, mask=inside, other=127).to(tl.int32) - 127
    half = _power_of_two(exponent >> 1)  # two factors, so that both powers are normal numbers
    rest = _power_of_two(exponent - (exponent >> 1))
    high, low = tl.split(_looked_up(_e2m1(tl.arange(0, 16)), pair))
    value = tl.reshape(tl.join(low * half * rest, high * half * rest), (2 * BYTES,)).to(out.dtype.element_ty)
    at = tl.program_id(0).to(tl.int64) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out + at, value, mask=at < 2 * bytes_)


def dequantize_mxfp4(data, scales, pairs, dtype):
    out = data.new_empty(2 * len(data), dtype=dtype)
    if len(data):
        _dequantize_mxfp4[(_ratio(len(data), 2 * COLUMNS),)](data, scales, out, len(data), BYTES=2 * COLUMNS)
    return out


# --- Activation --------------------------------------------------------------------------------------------------


@triton.jit
def _load_gate_up(row, first, size, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """Return COLUMNS columns of gate and of up from a row [2 · size], in float32; 0 for columns of `size` or more."""
    column, pair = first + tl.arange(0, COLUMNS), 2 * first + tl.arange(0, 2 * COLUMNS)
    if INTERLEAVED:
        both = tl.load(row + pair, mask=pair < 2 * size, other=0)
        gate, up = tl.split(tl.reshape(both, (COLUMNS, 2)))
    else:
        gate = tl.load(row + column, mask=column < size, other=0)
        up = tl.load(row + size + column, mask=column < size, other=0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_gate_up(row, first, size, gate, up, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """Store columns of gate and of up where `_load_gate_up` loads them."""
    column, pair = first + tl.arange(0, COLUMNS), 2 * first + tl.arange(0, 2 * COLUMNS)
    if INTERLEAVED:
        both = tl.reshape(tl.join(gate, up), (2 * COLUMNS,))
        tl.store(row + pair, both.to(row.dtype.element_ty), mask=pair < 2 * size)
    else:
        tl.store(row + column, gate.to(row.dtype.element_ty), mask=column < size)
        tl.store(row + size + column, up.to(row.dtype.element_ty), mask=column < size)


@triton.jit
def _gate(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """Return (act, ∂act/∂gate, ∂act/∂up) of SwiGLU, or of its clamped variant."""
    if CLAMPED:
        inside_gate, inside_up = gate <= limit, tl.abs(up) <= limit
        gate = tl.minimum(gate, limit)
        factor = tl.minimum(tl.maximum(up, -limit), limit) + 1
        sigmoid = tl.sigmoid(gate * alpha)
        glu = gate * sigmoid
        of_gate = sigmoid * (1 + gate * alpha * (1 - sigmoid)) * factor
        return glu * factor, tl.where(inside_gate, of_gate, 0.0), tl.where(inside_up, glu, 0.0)
    else:
        sigmoid = tl.sigmoid(gate)
        glu = gate * sigmoid
        return glu * up, sigmoid * (1 + gate * (1 - sigmoid)) * up, glu


@kernel()
def _gated(gate_up, act, size, alpha, limit, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, COLUMNS: tl.constexpr):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    gate, up = _load_gate_up(gate_up + row * size * 2, first, size, INTERLEAVED, COLUMNS)
    value, _, _ = _gate(gate, up, alpha, limit, CLAMPED)
    column = first + tl.arange(0, COLUMNS)
    tl.store(act + row * size + column, value.to(act.dtype.element_ty), mask=column < size)


def gated(gate_up, interleaved, alpha, limit):
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    act = gate_up.new_empty(rows, size)
    columns = min(COLUMNS, _next(size))
    if rows:
        _gated[(rows, _ratio(size, columns))](
            gate_up, act, size, float(alpha), float(limit), INTERLEAVED=interleaved, CLAMPED=limit > 0,
            COLUMNS=columns,
        )  # fmt: skip
    return act


@kernel(do_not_specialize_on_alignment=["order"])
def _gated_backward(
    gate_up, dact, weights, order, dweights, size, alpha, limit,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, WANTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    flat = tl.load(order + row)
    weight = tl.load(weights + flat).to(tl.float32)
    both, total = gate_up + row * size * 2, tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        gate, up = _load_gate_up(both, first, size, INTERLEAVED, COLUMNS)
        change = tl.load(dact + row * size + column, mask=column < size, other=0).to(tl.float32)
        act, of_gate, of_up = _gate(gate, up, alpha, limit, CLAMPED)
        total += change * act
        change *= weight
        _store_gate_up(both, first, size, change * of_gate, change * of_up, INTERLEAVED, COLUMNS)
        tl.store(dact + row * size + column, act.to(dact.dtype.element_ty), mask=column < size)
    if WANTED:
        tl.store(dweights + flat, tl.sum(total, 0).to(dweights.dtype.element_ty))


def gated_backward_(gate_up, dact, weights, order, dweights, interleaved, alpha, limit):
    rows, size = dact.shape
    if rows:
        _gated_backward[(rows,)](
            gate_up, dact, weights, order, weights if dweights is None else dweights, size,
            float(alpha), float(limit), INTERLEAVED=interleaved, CLAMPED=limit > 0, WANTED=dweights is not None,
            COLUMNS=min(COLUMNS, _next(size)),
        )  # fmt: skip


# --- Rows ---------------------------------------------------------------------------------------------------------


@kernel(do_not_specialize_on_alignment=["order"])
def _gather_rows(x, order, inverse, rows, size, top_k, NOTED: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    flat = tl.load(order + row)
    values = tl.load(x + flat // top_k * size + column, mask=column < size)
    tl.store(rows + row * size + column, values, mask=column < size)
    if NOTED and tl.program_id(1) == 0:
        tl.store(inverse + flat, row.to(tl.int32))


def gather_rows(x, order, top_k, inverse):
    size, columns = x.shape[1], min(COLUMNS, _next(x.shape[1]))
    rows = x.new_empty(order.shape[0], size)
    if order.shape[0]:
        _gather_rows[(order.shape[0], _ratio(size, columns))](
            x, order, order if inverse is None else inverse, rows, size, top_k, NOTED=inverse is not None,
            COLUMNS=columns,
        )  # fmt: skip
    return rows


@kernel()
def _sum_rows(out, rows, inverse, weights, size, top_k, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(top_k):
        row = tl.load(inverse + token * top_k + choice).to(tl.int64)
        values = tl.load(rows + row * size + column, mask=column < size, other=0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * top_k + choice).to(tl.float32)
        total += values
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def sum_rows_(out, rows, inverse, weights):
    (tokens, size), columns = out.shape, min(COLUMNS, _next(out.shape[1]))
    if tokens:
        _sum_rows[(tokens, _ratio(size, columns))](
            out, rows, inverse, rows if weights is None else weights, size, inverse.shape[0] // tokens,
            WEIGHTED=weights is not None, COLUMNS=columns,
        )  # fmt: skip


@kernel(do_not_specialize_on_alignment=["order"])
def _add_rows(out, rows, order, weights, size, top_k, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    flat = tl.load(order + row)
    values = tl.load(rows + row * size + column, mask=column < size, other=0).to(tl.float32)
    if WEIGHTED:
        values *= tl.load(weights + flat).to(tl.float32)
    sums = out + flat // top_k * size + column
    values += tl.load(sums, mask=column < size, other=0).to(tl.float32)
    tl.store(sums, values.to(out.dtype.element_ty), mask=column < size)


def add_rows_(out, rows, order, top_k, weights):
    size, columns = out.shape[1], min(COLUMNS, _next(out.shape[1]))
    if order.shape[0]:
        _add_rows[(order.shape[0], _ratio(size, columns))](
            out, rows, order, rows if weights is None else weights, size, top_k, WEIGHTED=weights is not None,
            COLUMNS=columns,
        )  # fmt: skip


# --- Low-rank products --------------------------------------------------------------------------------------------


@triton.jit
def _tile(ends, tile, count, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Find the rows of a tile: return (expert, first row of the tile, end of the expert's rows).

    Each expert's rows are divided into tiles of ROWS. The expert is `count` if there are fewer than `tile` + 1 tiles.
    """
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + number, mask=number < count, other=0)
    start = tl.load(ends + number - 1, mask=(number > 0) & (number < count), other=0)
    tiles = tl.where(number < count, (end - start + ROWS - 1) // ROWS, 0)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(number < expert, tiles, 0), 0)
    first = tl.sum(tl.where(number == expert, start, 0), 0) + (tile - before) * ROWS
    return tl.minimum(expert, count), first, tl.sum(tl.where(number == expert, end, 0), 0)


@kernel(do_not_specialize=["count_rows"])
def _low_rank(
    x, first, second, base, out, narrow, ends, count_rows, count, rank, wide_in, wide_out, each, parts,
    x_row, x_part, x_column, first_expert, first_part, first_rank, first_column,
    second_expert, second_part, second_row, second_rank,
    base_row, base_part, base_column, out_row, out_part, out_column, scale,
    GROUPED: tl.constexpr, ADDS: tl.constexpr, TOGETHER: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    expert, row, last = 0, tl.program_id(0) * ROWS, count_rows
    if GROUPED:
        expert, row, last = _tile(ends, tl.program_id(0), count, EXPERTS, ROWS)
        if expert == count:
            return
        expert = expert.to(tl.int64)  # factors of all experts may have more than 2^31 elements
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < last
    for following in tl.static_range(TOGETHER):
        part = tl.program_id(2) + following
        for block in range(RANKS):
            number = block * RANK + tl.arange(0, RANK)
            total = tl.zeros((ROWS, RANK), tl.float32)
            factor = first + expert * first_expert + part * first_part
            for start in range(0, wide_in, WIDE):
                column = start + tl.arange(0, WIDE)
                values = tl.load(
                    x + rows[:, None] * x_row + part * x_part + column[None, :] * x_column,
                    mask=inside[:, None] & (column < wide_in)[None, :], other=0,
                )  # fmt: skip
                a = tl.load(
                    factor + number[None, :] * first_rank + column[:, None] * first_column,
                    mask=(number < rank)[None, :] & (column < wide_in)[:, None], other=0,
                )  # fmt: skip
                total = tl.dot(values, a.to(values.dtype), total, input_precision="ieee")
            few = total.to(narrow.dtype.element_ty)
            if tl.program_id(1) == 0:
                to = narrow + (rows[:, None] * parts + part) * rank + number[None, :]
                tl.store(to, few, mask=inside[:, None] & (number < rank)[None, :])
            if ADDS:
                factor = second + expert * second_expert + part * second_part
                begin = tl.program_id(1) * each
                for start in range(begin, tl.minimum(begin + each, wide_out), WIDE):
                    column = start + tl.arange(0, WIDE)
                    b = tl.load(
                        factor + column[None, :] * second_row + number[:, None] * second_rank,
                        mask=(number < rank)[:, None] & (column < wide_out)[None, :], other=0,
                    )  # fmt: skip
                    more = tl.dot(few, b.to(few.dtype), input_precision="ieee")
                    mask = inside[:, None] & (column < wide_out)[None, :]
                    to = out + rows[:, None] * out_row + part * out_part + column[None, :] * out_column
                    since = base + rows[:, None] * base_row + part * base_part + column[None, :] * base_column
                    since = to if following > 0 else tl.where(block > 0, to, since) if RANKS > 1 else since
                    sums = tl.load(since, mask=mask, other=0).to(tl.float32) + scale * more
                    tl.store(to, sums.to(out.dtype.element_ty), mask=mask)
                if TOGETHER * RANKS > 1:
                    tl.debug_barrier()  # the next product reads these sums


def _tiles(rank: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tiles of the rank, the size, rows and columns of a tile and the pipeline stages, so that a tile fits
    into shared memory and registers."""
    padded = min(256 if dtype.itemsize == 2 else 32, max(16, _next(rank)))
    wide = (4096 if dtype.itemsize == 2 else 512) // padded
    return {
        "RANKS": _ratio(rank, padded), "RANK": padded, "ROWS": ROWS, "WIDE": max(16, min(64, wide)),
        "num_stages": 3 if padded < 64 else 2,
    }  # fmt: skip


def _strides(rows: Tensor) -> tuple[int, ...]:
    """Return the strides of (row, part, column) of [N, P, p], or of [N, p] with part stride 0: all parts read the
    same rows."""
    return rows.stride() if rows.dim() == 3 else (rows.stride(0), 0, rows.stride(1))


def low_rank(x, first, second, base, out, ends, counts, scale):
    rows, (experts, parts, rank) = x.shape[0], first.shape[:3]
    narrow = x.new_empty(rows, parts, rank)
    if not rows:
        return narrow
    tile = _tiles(rank, x.dtype)
    adds = second is not None and base is not None and out is not None
    if second is None or base is None or out is None:
        second, base, out = first, x, x
    wide_out = out.shape[-1] if adds else 0
    together = parts if adds and out.dim() == 2 else 1
    tiles = _ratio(rows, ROWS) + (experts if ends is not None else 0)
    # few tiles of rows leave a GPU idle: then columns are divided too, and each program repeats x·firstᵀ
    splits = max(1, min(512 // tiles, wide_out // 1024))
    each = _ratio(_ratio(wide_out, splits), tile["WIDE"]) * tile["WIDE"]
    _low_rank[(tiles, splits, parts // together)](
        x, first, second, base, out, narrow, x if ends is None else ends, rows, experts, rank, x.shape[-1], wide_out,
        each, parts, *_strides(x), *first.stride(), *second.stride(), *_strides(base), *_strides(out),
        float(scale), GROUPED=ends is not None, ADDS=adds, TOGETHER=together, EXPERTS=_next(experts), **tile,
    )  # fmt: skip
    return narrow


@triton.jit
def _outer(
    narrow, narrow_row, wide, out, weights, order, first, last, number, start, rank, size, wide_row, wide_column,
    out_rank, out_column, scale, WEIGHTED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = start + tl.arange(0, WIDE)
    total = tl.zeros((RANK, WIDE), tl.float32)
    for row in range(first, last, ROWS):
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < last
        few = tl.load(
            narrow + rows[None, :] * narrow_row + number[:, None],
            mask=inside[None, :] & (number < rank)[:, None], other=0,
        )  # fmt: skip
        factor = tl.full((ROWS,), 1.0, tl.float32) * scale
        if WEIGHTED:
            flat = tl.load(order + rows, mask=inside, other=0)
            factor *= tl.load(weights + flat, mask=inside, other=0).to(tl.float32)
        values = tl.load(
            wide + rows[:, None] * wide_row + column[None, :] * wide_column,
            mask=inside[:, None] & (column < size)[None, :], other=0,
        )  # fmt: skip
        few = (few.to(tl.float32) * factor[None, :]).to(values.dtype)
        total = tl.dot(few, values, total, input_precision="ieee")
    tl.store(
        out + number[:, None] * out_rank + column[None, :] * out_column,
        total.to(out.dtype.element_ty), mask=(number < rank)[:, None] & (column < size)[None, :],
    )  # fmt: skip


@kernel(do_not_specialize=["count_rows"], do_not_specialize_on_alignment=["order"])
def _low_rank_gradients(
    narrow_out, x, narrow_in, dout, of_first, of_second, weights, order, ends, count_rows, rank, wide_in, wide_out,
    narrow_row, x_row, x_column, dout_row, dout_part, dout_column, first_expert, first_part, first_rank, first_column,
    second_expert, second_part, second_row, second_rank, scale,
    GROUPED: tl.constexpr, WEIGHTED: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    expert, tile, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // RANKS, tl.program_id(2)
    number = tl.program_id(1) % RANKS * RANK + tl.arange(0, RANK)
    first, last = 0, count_rows
    if GROUPED:
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        last = tl.load(ends + expert)
    of_x = (wide_in + WIDE - 1) // WIDE
    if tile < of_x:
        _outer(
            narrow_out + part * rank, narrow_row, x, of_first + expert * first_expert + part * first_part, weights,
            order, first, last, number, tile * WIDE, rank, wide_in, x_row, x_column, first_rank, first_column, scale,
            WEIGHTED, RANK, ROWS, WIDE,
        )  # fmt: skip
    else:
        _outer(
            narrow_in + part * rank, narrow_row, dout + part * dout_part,
            of_second + expert * second_expert + part * second_part, weights,
            order, first, last, number, (tile - of_x) * WIDE, rank, wide_out, dout_row, dout_column, second_rank,
            second_row, scale, WEIGHTED, RANK, ROWS, WIDE,
        )  # fmt: skip


def low_rank_gradients_(narrow_out, x, narrow_in, dout, of_first, of_second, weights, order, ends, counts, scale):
    experts, parts, rank = of_first.shape[:3]
    # a rank of 64 in a tile becomes a WGMMA on 9.0, which some assemblers compile wrongly (triton-lang/triton#11781)
    tile = _tiles(min(32, rank), x.dtype)
    ranks = _ratio(rank, tile["RANK"])
    tiles = sum(_ratio(wide.shape[-1], tile["WIDE"]) for wide in (x, dout))
    weighted = weights is not None
    _low_rank_gradients[(experts, tiles * ranks, parts)](
        narrow_out, x, narrow_in, dout, of_first, of_second, weights if weighted else x, order if weighted else x,
        x if ends is None else ends, x.shape[0], rank, x.shape[1], dout.shape[-1], parts * rank, *x.stride(),
        *_strides(dout), *of_first.stride(), *of_second.stride(), float(scale),
        GROUPED=ends is not None, WEIGHTED=weighted, **tile | {"RANKS": ranks},
    )  # fmt: skip
