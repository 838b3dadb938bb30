"""Triton kernels of the operators in operators.py; those of low-rank products are in triton_low_rank.py.

Each function without a leading underscore implements the operator of that name and takes its arguments; operators.py
documents them. Import this file only with a GPU and Triton. Sums run in float32 in a fixed order, so that two runs give
the same bits.

Block sizes were not timed on a GPU; they are chosen to fit into the shared memory and registers of compute capability
8.6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moetune.kernels import FP8_BLOCK, INT8_STEP
from moetune.kernels.launch import ceil_div, kernel, next_power_of_2
from moetune.kernels.triton_low_rank import low_rank, low_rank_gradients_  # noqa: F401

BLOCKS_OF_64 = 64  # NF4 blocks of 64 weights per program, half as many as NVFP4 blocks of 16
ROWS_OF_FP8 = 32  # rows of an FP8 block of 128 × 128 weights per program
ROWS_OF_INT4, COLUMNS_OF_INT4 = 32, 128  # rows and columns of INT4 weights per program, which reads a scale for each 32
COLUMNS = 1024  # columns of a program's block, times 2 or 4 in some kernels


def _row_by_row(rows: int, size: int, most: int = COLUMNS) -> tuple[tuple[int, int], int]:
    """Return the grid, and the columns of a program's block, for programs that each have a part of one row."""
    columns = min(most, next_power_of_2(size))
    return (rows, ceil_div(size, columns)), columns


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
    """Look up both 4-bit codes of each byte in `pairs`: return [..., 2] values of `table`, that of the high bits first.

    `table` [16] has the value of each code, and `pairs` the bytes as int32. The table is in shared memory, each value
    in another memory bank, so that lookups do not conflict.
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
    of_nested = (absmax, absmax, absmax) if nested is None else (nested, code, offset)
    key = data.shape, absmax.shape, nested is None, of_nested[0].shape, weights
    _dequantize_nf4.planned(key, (data, absmax, *of_nested, out), _plan_nf4, data, absmax, nested, weights)
    return out


def _plan_nf4(data, absmax, nested, weights):
    blocks, is_nested = absmax.shape[1], nested is not None
    numbers = weights, data.shape[1], blocks, nested.shape[1] if is_nested else 0
    # without fused multiply-add, scales are bit for bit those of bitsandbytes
    constants = {"NESTED": is_nested, "BLOCKS": BLOCKS_OF_64, "enable_fp_fusion": False}
    return (ceil_div(blocks, BLOCKS_OF_64), data.shape[0]), numbers, constants


# --- int8, FP8, MXFP4, NVFP4 and INT4 -----------------------------------------------------------------------------


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
    grid, columns = _row_by_row(*data.shape, 4 * COLUMNS)
    _dequantize_int8[grid](data, absmax, out, data.shape[1], INT8_STEP, COLUMNS=columns)
    return out


@triton.jit
def _e4m3(code):
    """Return the value of a code in E4M3, 8-bit floats without infinities: 1 sign, 4 exponent, 3 mantissa bits.

    Source: OCP 8-bit Floating Point Specification, 5.1. The bits are moved to where float32 has them; its exponent's
    bias is greater by 120. No instruction on 8-bit floats is used, which compute capability 8.6 lacks.
    """
    value = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 127) == 127, float("nan"), value)


@kernel()
def _dequantize_fp8(
    data, scales, out, rows, size, high, wide, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    at = (matrix * rows + row)[:, None] * size + column[None, :]
    value = _e4m3(tl.load(data + at, mask=inside, other=0).to(tl.int32))
    scales += matrix * high * wide
    if HIGH > 1:  # all of the program's weights are in one block
        value *= tl.load(scales + tl.program_id(1) * ROWS // HIGH * wide + tl.program_id(0) * COLUMNS // WIDE)
    else:
        COUNT: tl.constexpr = COLUMNS // WIDE if WIDE < COLUMNS else 1  # blocks of a row
        block = tl.program_id(0) * COLUMNS // WIDE + tl.arange(0, COUNT)
        is_block = (row < rows)[:, None] & (block < wide)[None, :]
        scale = tl.load(scales + row[:, None] * wide + block[None, :], mask=is_block, other=0)
        value = tl.reshape(value, (ROWS, COUNT, COLUMNS // COUNT))
        if scales.dtype.element_ty == tl.uint8:
            exponent = scale.to(tl.int32) - 127
            half = _power_of_two(exponent >> 1)  # two factors, so that both powers are normal numbers
            value = value * half[:, :, None] * _power_of_two(exponent - (exponent >> 1))[:, :, None]
        else:
            value *= scale[:, :, None]
        value = tl.reshape(value, (ROWS, COLUMNS))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def dequantize_fp8(data, scales, high, wide, dtype):
    out = torch.empty_like(data, dtype=dtype)
    count, rows, size = data.shape
    grid = (ceil_div(size, FP8_BLOCK), ceil_div(rows, ROWS_OF_FP8), count)
    _dequantize_fp8[grid](
        data, scales, out, rows, size, scales.shape[1], scales.shape[2], HIGH=high or 1 << 30, WIDE=wide or 1 << 30,
        ROWS=ROWS_OF_FP8, COLUMNS=FP8_BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def _power_of_two(exponent):
    """Return 2**exponent for an integer exponent from -126 to 127, built from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code):
    """Return the value of an E2M1 code: 1 sign, 2 exponent, 1 mantissa bit (OCP Microscaling Formats 1.0, 5.3.3)."""
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
    _dequantize_mxfp4[(ceil_div(len(data), 2 * COLUMNS),)](data, scales, out, len(data), BYTES=2 * COLUMNS)
    return out


@kernel()
def _dequantize_nvfp4(data, scales, fractions, out, blocks, columns, wide, BLOCKS: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    pairs = tl.load(data + matrix * blocks * 8 + byte, mask=block[:, None] < blocks, other=0).to(tl.int32)
    scale = _e4m3(tl.load(scales + matrix * blocks + block, mask=block < blocks, other=0).to(tl.int32))
    scale = tl.div_rn(scale * tl.load(fractions + 2 * matrix), tl.load(fractions + 2 * matrix + 1))
    high, low = tl.split(_looked_up(_e2m1(tl.arange(0, 16)), pairs))
    levels = tl.reshape(tl.join(low, high), (BLOCKS, 16))
    column = (block % wide)[:, None] * 16 + tl.arange(0, 16)[None, :]
    value = (levels * scale[:, None]).to(out.dtype.element_ty)
    at = matrix * (blocks // wide) * columns + (block // wide)[:, None] * columns + column
    tl.store(out + at, value, mask=(block[:, None] < blocks) & (column < columns))


def dequantize_nvfp4(data, scales, fractions, columns, dtype):
    count, rows, wide = scales.shape
    out = data.new_empty(count, rows, columns, dtype=dtype)
    grid = (ceil_div(rows * wide, 2 * BLOCKS_OF_64), count)
    _dequantize_nvfp4[grid](data, scales, fractions, out, rows * wide, columns, wide, BLOCKS=2 * BLOCKS_OF_64)
    return out


@kernel()
def _dequantize_int4(
    data, scales, half, zeros, order, out, rows, columns, width, groups, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    first = tl.program_id(0) * COLUMNS
    byte = first // 2 + tl.arange(0, COLUMNS // 2)
    is_byte = inside[:, None] & (byte < width)[None, :]
    at = data + matrix * rows * width + (row * width)[:, None] + byte[None, :]
    pairs = tl.load(at, mask=is_byte, other=0).to(tl.int32)
    column = first + tl.arange(0, COLUMNS)
    is_column = column < columns
    COUNT: tl.constexpr = COLUMNS if ORDERED else COLUMNS // 32  # scales of a row that are read: one for each thread
    if ORDERED:
        group = tl.load(order + matrix * columns + column, mask=is_column, other=0).to(tl.int32)
    else:
        group = (first + 32 * tl.arange(0, COUNT)) // GROUP
        group = tl.where(group < groups, group, 0)
    at = scales + matrix * rows * groups + (row * groups)[:, None] + group[None, :]
    bits = tl.load(at, mask=inside[:, None], other=0)
    of_bf16 = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    scale = tl.where(tl.load(half + matrix) != 0, bits.to(tl.float16, bitcast=True).to(tl.float32), of_bf16)
    of_zeros = (groups + 1) // 2
    at = zeros + matrix * rows * of_zeros + (row * of_zeros)[:, None] + (group // 2)[None, :]
    zero = (tl.load(at, mask=inside[:, None], other=0).to(tl.int32) >> (4 * (group % 2))[None, :]) & 15
    levels = tl.reshape(tl.join(pairs & 15, pairs >> 4), (ROWS, COUNT, COLUMNS // COUNT)) - zero[:, :, None]
    value = tl.reshape(levels.to(tl.float32) * scale[:, :, None], (ROWS, COLUMNS)).to(out.dtype.element_ty)
    at = out + matrix * rows * columns + (row * columns)[:, None] + column[None, :]
    tl.store(at, value, mask=inside[:, None] & is_column[None, :])


def dequantize_int4(data, scales, half, zeros, order, group, columns, dtype):
    count, rows, width = data.shape
    out = data.new_empty(count, rows, columns, dtype=dtype)
    grid = (ceil_div(columns, COLUMNS_OF_INT4), ceil_div(rows, ROWS_OF_INT4), count)
    _dequantize_int4[grid](
        data, scales, half, zeros, data if order is None else order, out, rows, columns, width, scales.shape[2],
        GROUP=group or 1 << 30, ORDERED=order is not None, ROWS=ROWS_OF_INT4, COLUMNS=COLUMNS_OF_INT4,
    )  # fmt: skip
    return out


# --- Activation --------------------------------------------------------------------------------------------------


@triton.jit
def _load_gate_up(row, first, size, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """Load COLUMNS columns of gate and of up, from `first` on, in float32; 0 beyond `size`.

    `row` points at a row [2 · size], in which gate and up alternate if INTERLEAVED; otherwise gate comes first.
    """
    column, pair = first + tl.arange(0, COLUMNS), 2 * first + tl.arange(0, 2 * COLUMNS)
    if INTERLEAVED:
        pairs = tl.load(row + pair, mask=pair < 2 * size, other=0)
        gate, up = tl.split(tl.reshape(pairs, (COLUMNS, 2)))
    else:
        gate = tl.load(row + column, mask=column < size, other=0)
        up = tl.load(row + size + column, mask=column < size, other=0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_gate_up(row, first, size, gate, up, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """Store columns of gate and of up where `_load_gate_up` loads them."""
    column, pair = first + tl.arange(0, COLUMNS), 2 * first + tl.arange(0, 2 * COLUMNS)
    if INTERLEAVED:
        pairs = tl.reshape(tl.join(gate, up), (2 * COLUMNS,))
        tl.store(row + pair, pairs.to(row.dtype.element_ty), mask=pair < 2 * size)
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
    grid, columns = _row_by_row(rows, size)
    _gated[grid](
        gate_up, act, size, float(alpha), float(limit), INTERLEAVED=interleaved, CLAMPED=limit > 0, COLUMNS=columns
    )
    return act


@kernel(do_not_specialize_on_alignment=["order"])
def _gated_backward(
    gate_up, dact, weights, order, dweights, size, alpha, limit,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, WANTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    flat = tl.load(order + row)
    weight = tl.load(weights + flat).to(tl.float32)
    pairs, total = gate_up + row * size * 2, tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, size, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        gate, up = _load_gate_up(pairs, first, size, INTERLEAVED, COLUMNS)
        change = tl.load(dact + row * size + column, mask=column < size, other=0).to(tl.float32)
        act, of_gate, of_up = _gate(gate, up, alpha, limit, CLAMPED)
        total += change * act
        change *= weight
        _store_gate_up(pairs, first, size, change * of_gate, change * of_up, INTERLEAVED, COLUMNS)
        tl.store(dact + row * size + column, act.to(dact.dtype.element_ty), mask=column < size)
    if WANTED:
        tl.store(dweights + flat, tl.sum(total, 0).to(dweights.dtype.element_ty))


def gated_backward_(gate_up, dact, weights, order, dweights, interleaved, alpha, limit):
    rows, size = dact.shape
    _gated_backward[(rows,)](
        gate_up, dact, weights, order, weights if dweights is None else dweights, size, float(alpha), float(limit),
        INTERLEAVED=interleaved, CLAMPED=limit > 0, WANTED=dweights is not None, COLUMNS=_row_by_row(rows, size)[1],
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
    rows = x.new_empty(order.shape[0], x.shape[1])
    grid, columns = _row_by_row(*rows.shape)
    _gather_rows[grid](
        x, order, order if inverse is None else inverse, rows, x.shape[1], top_k, NOTED=inverse is not None,
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
    grid, columns = _row_by_row(*out.shape)
    _sum_rows[grid](
        out, rows, inverse, rows if weights is None else weights, out.shape[1],
        inverse.shape[0] // max(1, out.shape[0]), WEIGHTED=weights is not None, COLUMNS=columns,
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
    grid, columns = _row_by_row(*rows.shape)
    _add_rows[grid](
        out, rows, order, rows if weights is None else weights, out.shape[1], top_k, WEIGHTED=weights is not None,
        COLUMNS=columns,
    )  # fmt: skip
