"""Triton kernels of low-rank products and of their gradients.

As in triton_kernels.py, each function without a leading underscore implements the operator of that name. Programs of
grouped products find their tile from the ends of the experts' rows on the device, without the host.

Block sizes were not timed on a GPU; they are chosen to fit into the shared memory and registers of compute capability
8.6.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moetune.kernels.launch import ceil_div, kernel, next_power_of_2

ROWS = 32  # rows of a tile of a product


@triton.jit
def _tile(ends, tile, count, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Find the rows of tile number `tile`: return (expert, first row of the tile, end of the expert's rows).

    `ends` are the ends of the rows of `count` experts; each expert's rows are divided into tiles of ROWS. The expert is
    `count` if there are fewer than `tile` + 1 tiles.
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
    GROUPED: tl.constexpr, ADDS: tl.constexpr, TOGETHER: tl.constexpr, X_ALTERNATES: tl.constexpr,
    OUT_ALTERNATES: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    # STACKED parts are one product, with RANK terms of each; columns of x or out that alternate are read in a row, and
    # the factors of the other parts count as zero there. TOGETHER parts are products one after another.
    expert, row, last = 0, tl.program_id(0) * ROWS, count_rows
    if GROUPED:
        expert, row, last = _tile(ends, tl.program_id(0), count, EXPERTS, ROWS)
        if expert == count:
            return
        expert = expert.to(tl.int64)  # factors of all experts may have more than 2^31 elements
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < last
    term = tl.arange(0, STACKED * RANK)
    for following in tl.static_range(TOGETHER):
        part = tl.program_id(2) + following
        of = part + term // RANK
        for block in range(RANKS):
            number = block * RANK + term % RANK
            total = tl.zeros((ROWS, STACKED * RANK), tl.float32)
            factor = first + expert * first_expert + of * first_part
            end = wide_in * STACKED if X_ALTERNATES else wide_in
            for start in range(0, end, WIDE):
                index = start + tl.arange(0, WIDE)
                column, own = index, (number < rank)[None, :]
                if X_ALTERNATES:
                    column = index // STACKED
                    own &= (index % STACKED)[:, None] == of[None, :]
                values = tl.load(
                    x + rows[:, None] * x_row + part * x_part + index[None, :] * x_column,
                    mask=inside[:, None] & (index < end)[None, :], other=0,
                )  # fmt: skip
                a = tl.load(
                    factor[None, :] + number[None, :] * first_rank + column[:, None] * first_column,
                    mask=own & (index < end)[:, None], other=0,
                )  # fmt: skip
                total = tl.dot(values, a.to(values.dtype), total, input_precision="ieee")
            few = total.to(narrow.dtype.element_ty)
            if tl.program_id(1) == 0:
                to = narrow + (rows[:, None] * parts + of[None, :]) * rank + number[None, :]
                tl.store(to, few, mask=inside[:, None] & (number < rank)[None, :])
            if ADDS:
                factor = second + expert * second_expert + of * second_part
                begin, end = tl.program_id(1) * each, wide_out * STACKED if OUT_ALTERNATES else wide_out
                for start in range(begin, tl.minimum(begin + each, end), WIDE):
                    index = start + tl.arange(0, WIDE)
                    column, own = index, (number < rank)[:, None]
                    if OUT_ALTERNATES:
                        column = index // STACKED
                        own &= (index % STACKED)[None, :] == of[:, None]
                    b = tl.load(
                        factor[:, None] + column[None, :] * second_row + number[:, None] * second_rank,
                        mask=own & (index < end)[None, :], other=0,
                    )  # fmt: skip
                    product = tl.dot(few, b.to(few.dtype), input_precision="ieee")
                    mask = inside[:, None] & (index < end)[None, :]
                    to = out + rows[:, None] * out_row + part * out_part + index[None, :] * out_column
                    since = base + rows[:, None] * base_row + part * base_part + index[None, :] * base_column
                    if following > 0:
                        since = to
                    elif RANKS > 1:
                        since = tl.where(block > 0, to, since)
                    sums = tl.load(since, mask=mask, other=0).to(tl.float32) + scale * product
                    tl.store(to, sums.to(out.dtype.element_ty), mask=mask)
                if TOGETHER * RANKS > 1:
                    tl.debug_barrier()  # the next product reads these sums


@cache
def _tiles(rank: int, dtype: torch.dtype, stacked: int = 1) -> dict[str, int]:
    """Return launch options by rank and dtype, so that a tile fits into shared memory and registers.

    RANKS tiles of RANK cover the rank of each of `stacked` parts; ROWS and WIDE are the rows and columns of a tile.
    """
    most = 256 if dtype.itemsize == 2 else 32
    padded = min(most // stacked, max(16, next_power_of_2(rank)))
    wide = (4096 if dtype.itemsize == 2 else 512) // (stacked * padded)
    return {
        "RANKS": ceil_div(rank, padded), "RANK": padded, "ROWS": ROWS, "WIDE": max(16, min(64, wide)),
        "STACKED": stacked, "num_stages": 3 if stacked * padded < 64 else 2,
    }  # fmt: skip


def _alternates(rows: Tensor) -> bool:
    """Return whether `rows` [N, 2, p] are those of two parts whose columns alternate in memory."""
    return rows.dim() == 3 and rows.shape[1] == 2 and rows.stride(2) == 2 * rows.stride(1)


def _strides(rows: Tensor, *, alternates: bool) -> tuple[int, ...]:
    """Return the strides (row, part, column) of rows [N, P, p]; part stride 0 for rows [N, p] that all parts share, and
    for parts whose columns alternate, which are read as rows of P·p columns."""
    return rows.stride() if rows.dim() == 3 and not alternates else (rows.stride(0), 0, rows.stride(1))


def _plan(x, first, second, base, out, grouped, adds, scale):
    rows, (experts, parts, rank) = x.shape[0], first.shape[:3]
    x_alternates, out_alternates = _alternates(x), adds and _alternates(base) and _alternates(out)
    stacked = 2 if x_alternates or out_alternates else 1
    tile = _tiles(rank, x.dtype, stacked)
    wide_out = out.shape[-1] if adds else 0
    together = parts if adds and out.dim() == 2 and stacked == 1 else 1
    tiles = ceil_div(rows, ROWS) + (experts if grouped else 0)
    # few tiles of rows leave a GPU idle: then columns are divided too, and each program repeats x·firstᵀ
    across = wide_out * (2 if out_alternates else 1)
    splits = max(1, min(512 // tiles, across // 1024))
    each = ceil_div(ceil_div(across, splits), tile["WIDE"]) * tile["WIDE"]
    grid = tiles, splits, parts // (together * stacked)
    numbers = (
        rows, experts, rank, x.shape[-1], wide_out, each, parts, *_strides(x, alternates=x_alternates),
        *first.stride(), *second.stride(), *_strides(base, alternates=out_alternates),
        *_strides(out, alternates=out_alternates), float(scale),
    )  # fmt: skip
    constants = {
        "GROUPED": grouped, "ADDS": adds, "TOGETHER": together, "X_ALTERNATES": x_alternates,
        "OUT_ALTERNATES": out_alternates, "EXPERTS": next_power_of_2(experts), **tile,
    }  # fmt: skip
    return grid, numbers, constants


def low_rank(x, first, second, base, out, ends, counts, scale):
    narrow = x.new_empty(x.shape[0], *first.shape[1:3])
    if not x.shape[0]:
        return narrow
    adds = second is not None and base is not None and out is not None
    if second is None or base is None or out is None:
        second, base, out = first, x, x
    key = (
        x.shape, x.stride(), first.shape, first.stride(), second.stride(), base.stride(), out.shape, out.stride(),
        ends is None, adds, scale,
    )  # fmt: skip
    tensors = x, first, second, base, out, narrow, x if ends is None else ends
    _low_rank.planned(key, tensors, _plan, *tensors[:5], ends is not None, adds, scale)
    return narrow


@triton.jit
def _outer(
    narrow, narrow_row, wide, out, weights, order, first, last, part, number, start, rank, size, wide_row, wide_part,
    wide_column, out_part, out_rank, out_column, scale,
    WEIGHTED: tl.constexpr, STACKED: tl.constexpr, ALTERNATES: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    term = tl.arange(0, STACKED * RANK)
    of, number = part + term // RANK, number + term % RANK
    index, end = start + tl.arange(0, WIDE), size * STACKED if ALTERNATES else size
    column, own = index, (number < rank)[:, None]
    if ALTERNATES:
        column = index // STACKED
        own &= (index % STACKED)[None, :] == of[:, None]
    total = tl.zeros((STACKED * RANK, WIDE), tl.float32)
    for row in range(first, last, ROWS):
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < last
        few = tl.load(
            narrow + rows[None, :] * narrow_row + (of * rank + number)[:, None],
            mask=inside[None, :] & (number < rank)[:, None], other=0,
        )  # fmt: skip
        factor = tl.full((ROWS,), 1.0, tl.float32) * scale
        if WEIGHTED:
            flat = tl.load(order + rows, mask=inside, other=0)
            factor *= tl.load(weights + flat, mask=inside, other=0).to(tl.float32)
        values = tl.load(
            wide + rows[:, None] * wide_row + part * wide_part + index[None, :] * wide_column,
            mask=inside[:, None] & (index < end)[None, :], other=0,
        )  # fmt: skip
        few = (few.to(tl.float32) * factor[None, :]).to(values.dtype)
        total = tl.dot(few, values, total, input_precision="ieee")
    tl.store(
        out + of[:, None] * out_part + number[:, None] * out_rank + column[None, :] * out_column,
        total.to(out.dtype.element_ty), mask=own & (index < end)[None, :],
    )  # fmt: skip


@kernel(do_not_specialize=["count_rows"], do_not_specialize_on_alignment=["order"])
def _low_rank_gradients(
    narrow_out, x, narrow_in, dout, of_first, of_second, weights, order, ends, count_rows, rank, wide_in, wide_out,
    narrow_row, x_row, x_column, dout_row, dout_part, dout_column, first_expert, first_part, first_rank, first_column,
    second_expert, second_part, second_row, second_rank, scale,
    GROUPED: tl.constexpr, WEIGHTED: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    expert, tile, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // RANKS, tl.program_id(2)
    number = tl.program_id(1) % RANKS * RANK
    first, last = 0, count_rows
    if GROUPED:
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        last = tl.load(ends + expert)
    of_x = (wide_in + WIDE - 1) // WIDE
    if tile < of_x:
        _outer(
            narrow_out, narrow_row, x, of_first + expert * first_expert, weights, order, first, last, part, number,
            tile * WIDE, rank, wide_in, x_row, 0, x_column, first_part, first_rank, first_column, scale,
            WEIGHTED, STACKED, False, RANK, ROWS, WIDE,
        )  # fmt: skip
    else:
        _outer(
            narrow_in, narrow_row, dout, of_second + expert * second_expert, weights, order, first, last, part, number,
            (tile - of_x) * WIDE, rank, wide_out, dout_row, dout_part, dout_column, second_part, second_rank,
            second_row, scale, WEIGHTED, STACKED, STACKED > 1, RANK, ROWS, WIDE,
        )  # fmt: skip


def _plan_gradients(x, narrow_in, dout, of_first, of_second, adds, grouped, weighted, scale):
    experts = max(of_first.shape[0], of_second.shape[0])
    _, parts, rank = narrow_in.shape
    wide_in, wide_out = x.shape[1] * adds[0], dout.shape[-1] * adds[1]
    stacked = 2 if _alternates(dout) else 1
    # a rank of 64 in a tile becomes a WGMMA on 9.0, which some assemblers compile wrongly (triton-lang/triton#11781)
    tile = _tiles(min(32 // stacked, rank), x.dtype, stacked)
    ranks = ceil_div(rank, tile["RANK"])
    tiles = sum(ceil_div(size, tile["WIDE"]) for size in (wide_in, wide_out * stacked))
    numbers = (
        x.shape[0], rank, wide_in, wide_out, parts * rank, *x.stride(), *_strides(dout, alternates=stacked == 2),
        *of_first.stride(), *of_second.stride(), float(scale),
    )  # fmt: skip
    constants = {"GROUPED": grouped, "WEIGHTED": weighted, **tile, "RANKS": ranks}
    return (experts, tiles * ranks, parts // stacked), numbers, constants


def low_rank_gradients_(narrow_out, x, narrow_in, dout, of_first, of_second, weights, order, ends, counts, scale):
    adds, weighted = (of_first is not None, of_second is not None), weights is not None
    none = narrow_in[None]  # in the place of a gradient that is skipped: no tile covers its 0 columns
    of_first, of_second = none if of_first is None else of_first, none if of_second is None else of_second
    key = (
        x.shape, x.stride(), narrow_in.shape, dout.shape, dout.stride(), of_first.shape, of_first.stride(),
        of_second.shape, of_second.stride(), adds, ends is None, weighted, scale,
    )  # fmt: skip
    tensors = (
        narrow_out, x, narrow_in, dout, of_first, of_second, weights if weighted else x, order if weighted else x,
        x if ends is None else ends,
    )  # fmt: skip
    plan = x, narrow_in, dout, of_first, of_second, adds, ends is not None, weighted, scale
    _low_rank_gradients.planned(key, tensors, _plan_gradients, *plan)
