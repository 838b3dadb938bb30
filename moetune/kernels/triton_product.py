"""Triton kernels of the grouped products in grouped.py, and their tiles (`TILES`).

Import this file only with a GPU and Triton. Each element of the result is summed in float32, 16 terms at a time, in the
same order for every tile: where Triton multiplies by `mma.sync` (compute capability 8.x and 12.x), the choice of a tile
changes no bit. Only the result is allocated.

The list of tiles was not timed on a GPU; it is chosen to fit into the shared memory and registers of compute capability
8.6.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from moetune.kernels.launch import ceil_div, kernel, next_power_of_2
from moetune.kernels.tuning import Tile, fastest, tiled

TILES = (
    Tile(128, 128, 32, num_warps=8, num_stages=4),
    Tile(128, 128, 32, num_warps=4, num_stages=4),
    Tile(128, 256, 32, num_warps=8, num_stages=4),
    Tile(128, 64, 32, num_warps=4, num_stages=4),
    Tile(64, 128, 32, num_warps=4, num_stages=4),
    Tile(64, 64, 64, num_warps=4, num_stages=4),
    Tile(32, 128, 64, num_warps=4, num_stages=4),
    Tile(16, 128, 64, num_warps=4, num_stages=4),
)
BAND = 8  # tiles of rows that read the same columns one after the other, while these are in the cache


@triton.jit
def _sum_of_products(
    a, b, inside, within, deep, a_row, a_deep, b_deep, b_wide,
    total, WHOLE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Add the product [ROWS, WIDE] of the matrices at `a` and `b`, summed over `deep` columns of a, to `total`.

    `a` and `b` are pointers. `inside` [ROWS] and `within` [WIDE] are True for the rows of a and the columns of b that
    exist. WHOLE says that DEEP divides `deep`.
    """
    index = tl.arange(0, DEEP)
    lefts = a + tl.arange(0, ROWS)[:, None] * a_row + index[None, :] * a_deep
    rights = b + index[:, None] * b_deep + tl.arange(0, WIDE)[None, :] * b_wide
    for start in range(0, deep, DEEP):
        left_inside, right_inside = inside[:, None], within[None, :]
        if not WHOLE:
            left_inside &= (index < deep - start)[None, :]
            right_inside &= (index < deep - start)[:, None]
        left = tl.load(lefts, mask=left_inside, other=0)
        right = tl.load(rights, mask=right_inside, other=0)
        total = tl.dot(left, right, total, input_precision="ieee")
        lefts += DEEP * a_deep
        rights += DEEP * b_deep
    return total


@triton.jit
def _low_rank_terms(
    narrow, second, inside, column, wide, rank, second_part, second_row, second_rank,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the product [ROWS, WIDE] of narrow rows and second factors, without the scale.

    `narrow` points at the tile's first row [PARTS, rank], `second` at the expert's factors [PARTS, rows, rank].
    `inside` [ROWS] is True for rows that exist. `column` [WIDE] are indices of columns of the result, which has `wide`
    columns. COLUMNS says which columns a part contributes to: "all" of them, "consecutive" ones, or every PARTS-th
    ("alternate").
    """
    total = tl.zeros((ROWS, WIDE), tl.float32)
    row = tl.arange(0, ROWS)
    for part in tl.static_range(PARTS):
        of_part, own = column, column < wide
        if COLUMNS == "consecutive":
            of_part = column - part * (wide // PARTS)
            own &= (of_part >= 0) & (of_part < wide // PARTS)
        if COLUMNS == "alternate":
            of_part = column // PARTS
            own &= column % PARTS == part
        for start in tl.range(0, rank, RANK, num_stages=1):
            number = start + tl.arange(0, RANK)
            few = tl.load(
                narrow + (row[:, None] * PARTS + part) * rank + number[None, :],
                mask=inside[:, None] & (number < rank)[None, :], other=0,
            )  # fmt: skip
            factor = tl.load(
                second + part * second_part + of_part[None, :] * second_row + number[:, None] * second_rank,
                mask=own[None, :] & (number < rank)[:, None], other=0,
            )  # fmt: skip
            total = tl.dot(few, factor.to(few.dtype), total, input_precision="ieee")
    return total


@kernel(do_not_specialize_on_alignment=["ends"])
def _rows_by_matrices(
    a, b, ends, narrow, second, out, count, deep, wide, rank, a_row, a_deep, b_expert, b_deep, b_wide,
    second_expert, second_part, second_row, second_rank, scale,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr, BAND: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    across = (wide + WIDE - 1) // WIDE
    band, number = tl.program_id(0) // (BAND * across), tl.program_id(0) % (BAND * across)
    high = tl.minimum(tl.num_programs(0) // across - band * BAND, BAND)
    slot, column = band * BAND + number % high, number // high * WIDE
    # Expert e has the slots from begin // ROWS + e on, one for each of its tiles; at most one more follows.
    experts = tl.arange(0, EXPERTS)
    begins = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < count), other=0)
    expert = tl.sum(((begins // ROWS + experts <= slot) & (experts < count)).to(tl.int32), 0) - 1
    begin, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    row = begin + (slot - expert - begin // ROWS) * ROWS
    if row >= end:
        return
    inside, within = row + tl.arange(0, ROWS) < end, column + tl.arange(0, WIDE) < wide
    total = tl.zeros((ROWS, WIDE), tl.float32)
    if PARTS:
        total = scale * _low_rank_terms(
            narrow + row.to(tl.int64) * PARTS * rank, second + expert.to(tl.int64) * second_expert, inside,
            column + tl.arange(0, WIDE), wide, rank, second_part, second_row, second_rank,
            PARTS, COLUMNS, RANK, ROWS, WIDE,
        )  # fmt: skip
    total = _sum_of_products(
        a + row.to(tl.int64) * a_row, b + expert.to(tl.int64) * b_expert + column.to(tl.int64) * b_wide,
        inside, within, deep, a_row, a_deep, b_deep, b_wide, total, WHOLE, ROWS, WIDE, DEEP,
    )  # fmt: skip
    to = out + row.to(tl.int64) * wide + column + tl.arange(0, ROWS)[:, None] * wide + tl.arange(0, WIDE)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None] & within[None, :])


@kernel(do_not_specialize_on_alignment=["ends"])
def _outer(
    a, b, ends, out, high, wide, a_high, a_row, b_row, b_wide,
    ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    begin, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    across = (wide + WIDE - 1) // WIDE
    row, column = tl.program_id(0) // across * ROWS, tl.program_id(0) % across * WIDE
    inside, within = row + tl.arange(0, ROWS) < high, column + tl.arange(0, WIDE) < wide
    first = begin.to(tl.int64)
    total = _sum_of_products(
        a + first * a_row + row.to(tl.int64) * a_high, b + first * b_row + column.to(tl.int64) * b_wide,
        inside, within, end - begin, a_high, a_row, b_row, b_wide,
        tl.zeros((ROWS, WIDE), tl.float32), False, ROWS, WIDE, DEEP,
    )  # fmt: skip
    to = out + (expert * high + row) * wide + column + tl.arange(0, ROWS)[:, None] * wide + tl.arange(0, WIDE)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None] & within[None, :])


@tiled(TILES)
def grouped_mm(a, b, ends, counts, tile=None):
    if b.dim() == 3:
        out = a.new_empty(a.shape[0], b.shape[2])
        _multiply(out, a, b, ends, None, tile)
        return out
    out, run = a.new_empty(len(ends), a.shape[0], b.shape[1]), partial(_launch_outer, a, b, ends)
    if out.numel():
        tiles = [tile for tile in TILES if tile.rows >= 64]
        run(out, tile if tile in tiles else _tile(run, out, tiles, b.shape[0], len(ends), a.T, b))
    return out


@tiled(TILES)
def low_rank_product_(out, rows, matrices, narrow, second, ends, counts, scale, interleaved, tile=None):
    columns = "all" if second.shape[2] == out.shape[1] else "alternate" if interleaved else "consecutive"
    _multiply(out, rows, matrices, ends, (narrow, second, float(scale), columns), tile)


def _multiply(out, a, b, ends, terms, tile):
    experts, rows = b.shape[0], a.shape[0]
    if out.numel():
        # in a tile of more than twice the rows of an expert, most would be empty
        tiles = [tile for tile in TILES if tile.rows <= max(16, 2 * rows // experts)]
        run = partial(_launch_rows, a, b, ends, terms)
        run(out, tile or _tile(run, out, tiles, rows, experts, a, b, *(() if terms is None else terms[:2])))


def _tile(run, out, tiles, rows, experts, *operands):
    """Return the tile to launch with: on a GPU the fastest of `tiles` (see `fastest`), on a CPU the first.

    The fastest is found anew for each kernel, number of experts, rows per expert (in ranges 0, 1, 2-3, 4-7, 8-15, …),
    and dtypes, strides and shapes (without the first dimension) of the operands. `run(out, tile)` launches the kernel.
    """
    if not out.is_cuda:
        return tiles[0]
    layouts = [(str(operand.dtype), *operand.shape[1:], *operand.stride()) for operand in operands]
    return fastest(run.func.__name__, (experts, (rows // experts).bit_length(), *layouts), tiles, partial(run, out))


def _launch_rows(a, b, ends, terms, out, tile):
    experts, deep, wide = b.shape
    slots, across = a.shape[0] // tile.rows + experts, ceil_div(wide, tile.wide)
    narrow, second, scale, columns = (a, b[:, None], 0.0, "all") if terms is None else terms
    rank = narrow.shape[-1]
    _rows_by_matrices[(slots * across,)](
        a, b, ends, narrow, second, out, experts, deep, wide, 0 if terms is None else rank, *a.stride(), *b.stride(),
        *second.stride(), scale, PARTS=0 if terms is None else narrow.shape[1], COLUMNS=columns,
        RANK=16 if terms is None or rank <= 16 else 32, WHOLE=deep % tile.deep == 0, BAND=BAND,
        EXPERTS=next_power_of_2(experts), ROWS=tile.rows, WIDE=tile.wide, DEEP=tile.deep,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_outer(a, b, ends, out, tile):
    experts, high, wide = out.shape
    _outer[(ceil_div(high, tile.rows) * ceil_div(wide, tile.wide), experts)](
        a, b, ends, out, high, wide, *a.stride(), *b.stride(), ROWS=tile.rows, WIDE=tile.wide, DEEP=tile.deep,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
