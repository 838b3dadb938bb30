"""Triton kernels of the operators in routing.py. Import this file only with a GPU and Triton.

Block sizes were not timed on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moetune.kernels.launch import ceil_div, kernel, next_power_of_2

LOGITS = 512  # logits that a program reads, at least those of one token; one warp, so that no sum crosses warps
NUMBERS = 512  # numbers that a program sorts
AT_ONCE = 4096  # comparisons of a number with an expert at a time


# --- Choice -------------------------------------------------------------------------------------------------------


@triton.jit
def _probabilities(logits, row, expert, experts):
    """Return the softmax over the experts of a tile's rows, [ROWS, EXPERTS] in float32; 0 beyond the last expert.

    `logits` points at logits [T, experts]; `row` [ROWS, 1] and `expert` [1, EXPERTS] are indices in them.
    """
    z = tl.load(logits + row * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    p = tl.exp(z - tl.max(z, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@kernel(do_not_specialize=["tokens"])
def _choose(
    logits, weights, ids, tokens, experts,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, GIVEN: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    number, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, EXPERTS)[None, :]
    row = tl.where(number < tokens, number, 0).to(tl.int64)
    p = _probabilities(logits, row, expert, experts)
    left = tl.where(expert < experts, tl.where(p == p, p, 0.0), -1.0)  # without NaN, to choose K experts all the same
    slot = tl.full((ROWS, EXPERTS), TOP_K, tl.int32)  # of each expert among those chosen
    for choice in tl.static_range(TOP_K):
        if GIVEN:
            best = tl.load(ids + row * TOP_K + choice)
        else:
            is_best = left == tl.max(left, 1)[:, None]
            best = tl.min(tl.where(is_best, expert, EXPERTS), 1)[:, None]
            left = tl.where(expert == best, -1.0, left)
            tl.store(ids + row * TOP_K + choice, best.to(tl.int64), mask=number < tokens)
        slot = tl.where(expert == best, choice, slot)
    if NORMALIZED:
        p /= tl.sum(tl.where(slot < TOP_K, p, 0.0), 1)[:, None]
    for choice in tl.static_range(TOP_K):
        weight = tl.sum(tl.where(slot == choice, p, 0.0), 1)[:, None]
        tl.store(weights + row * TOP_K + choice, weight.to(weights.dtype.element_ty), mask=number < tokens)


def _tiles(tokens, experts):
    rows = max(1, LOGITS // next_power_of_2(experts))
    return (ceil_div(tokens, rows),), {"ROWS": rows, "EXPERTS": next_power_of_2(experts), "num_warps": 1}


def choose(logits, top_k, normalized, dtype):
    (tokens, experts), logits = logits.shape, logits.contiguous()
    weights = logits.new_empty(tokens, top_k, dtype=dtype)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int64)
    grid, tile = _tiles(tokens, experts)
    _choose[grid](logits, weights, ids, tokens, experts, TOP_K=top_k, NORMALIZED=normalized, GIVEN=False, **tile)
    return weights, ids


def weigh(logits, ids, normalized, dtype):
    (tokens, experts), logits = logits.shape, logits.contiguous()
    weights = logits.new_empty(ids.shape, dtype=dtype)
    grid, tile = _tiles(tokens, experts)
    _choose[grid](
        logits, weights, ids.contiguous(), tokens, experts, TOP_K=ids.shape[1], NORMALIZED=normalized, GIVEN=True,
        **tile,
    )  # fmt: skip
    return weights


@kernel(do_not_specialize=["tokens"])
def _weigh_backward(
    dweights, logits, ids, dlogits, tokens, experts,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    number, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, EXPERTS)[None, :]
    row = tl.where(number < tokens, number, 0).to(tl.int64)
    base = _probabilities(logits, row, expert, experts)
    change = tl.zeros((ROWS, EXPERTS), tl.float32)
    is_chosen = change
    for choice in tl.static_range(TOP_K):
        is_this = expert == tl.load(ids + row * TOP_K + choice)
        change = tl.where(is_this, tl.load(dweights + row * TOP_K + choice).to(tl.float32), change)
        is_chosen = tl.where(is_this, 1.0, is_chosen)
    if NORMALIZED:
        base *= is_chosen
        base /= tl.sum(base, 1)[:, None]
    change = base * (change - tl.sum(base * change, 1)[:, None])
    mask = (number < tokens) & (expert < experts)
    tl.store(dlogits + row * experts + expert, change.to(dlogits.dtype.element_ty), mask=mask)


def weigh_backward(dweights, logits, ids, normalized):
    dlogits, (tokens, experts) = torch.empty_like(logits, memory_format=torch.contiguous_format), logits.shape
    grid, tile = _tiles(tokens, experts)
    _weigh_backward[grid](
        dweights.contiguous(), logits.contiguous(), ids.contiguous(), dlogits, tokens, experts,
        TOP_K=ids.shape[1], NORMALIZED=normalized, **tile,
    )  # fmt: skip
    return dlogits


# --- Sorting ------------------------------------------------------------------------------------------------------


@kernel(do_not_specialize=["size"], do_not_specialize_on_alignment=["numbers"])
def _count(numbers, counts, size, NUMBERS: tl.constexpr, AT_ONCE: tl.constexpr, EXPERTS: tl.constexpr):
    expert = tl.arange(0, EXPERTS)[None, :]
    counted = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, NUMBERS, AT_ONCE):
        index = tl.program_id(0) * NUMBERS + first + tl.arange(0, AT_ONCE)
        number = tl.load(numbers + index, mask=index < size, other=EXPERTS).to(tl.int32)
        counted += tl.sum((number[:, None] == expert).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counted)


@kernel(do_not_specialize=["size", "blocks"], do_not_specialize_on_alignment=["numbers"])
def _place(
    numbers, counts, order, ends, size, blocks, experts,
    NUMBERS: tl.constexpr, AT_ONCE: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)[None, :]
    total, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)[:, None]
        counted = tl.load(counts + block * EXPERTS + expert, mask=block < blocks, other=0)
        total += tl.sum(counted, 0)
        before += tl.sum(tl.where(block < tl.program_id(0), counted, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(ends + tl.arange(0, EXPERTS), tl.cumsum(total, 0), mask=tl.arange(0, EXPERTS) < experts)
    following = tl.cumsum(total, 0) - total + before  # where the block's next row of each expert belongs
    for first in range(0, NUMBERS, AT_ONCE):
        index = tl.program_id(0) * NUMBERS + first + tl.arange(0, AT_ONCE)
        number = tl.load(numbers + index, mask=index < size, other=EXPERTS).to(tl.int32)
        is_this = (number[:, None] == expert).to(tl.int32)
        to = tl.sum(is_this * (following[None, :] + tl.cumsum(is_this, 0) - 1), 1)
        tl.store(order + to, index.to(tl.int64), mask=index < size)
        following += tl.sum(is_this, 0)


def sorted_positions(numbers, count):
    size = numbers.shape[0]
    order = numbers.new_empty(size, dtype=torch.int64)
    blocks, experts = ceil_div(size, NUMBERS), next_power_of_2(count)
    counts = numbers.new_empty(blocks, experts, dtype=torch.int32)
    ends = numbers.new_empty(count, dtype=torch.int32)
    tile = {"NUMBERS": NUMBERS, "AT_ONCE": max(1, min(NUMBERS, AT_ONCE // experts)), "EXPERTS": experts}
    numbers = numbers.contiguous()
    _count[(blocks,)](numbers, counts, size, **tile)
    _place[(blocks,)](numbers, counts, order, ends, size, blocks, count, **tile)
    return order, ends if blocks else ends.zero_()
