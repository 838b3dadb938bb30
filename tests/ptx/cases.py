"""Calls of the operators with random sizes, layouts, data types and numbers of rows."""

import random
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moetune.experts.quantized import QuantizedExperts

Call = tuple[str, list[Any]]
"""An operator's name and its arguments."""

GATES = ((False, 1.0, 0.0), (True, 1.0, 0.0), (True, 1.702, 1.5), (False, 1.702, 1.5))
OPERATORS = (
    "low_rank", "low_rank_gradients_", "gated", "gated_backward_", "gather_rows", "sum_rows_", "add_rows_",
    "dequantize_nf4", "dequantize_int8", "dequantize_fp8", "dequantize_nvfp4", "dequantize_mxfp4",
    "dequantize_int4",
)  # fmt: skip


class Draw:
    """Random arguments of operators; the same for the same seed.

    Args:
        seed: of all draws.
        dtype: of the token rows.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype, self.one_of = dtype, random.Random(seed).choice
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return random values, at an address that is a multiple of 16 bytes or not."""
        skipped = self.one_of((0, 0, 1))
        size = torch.Size(shape).numel()
        values = torch.randn(size + skipped, generator=self._generator).to(dtype or self.dtype)
        return values[skipped:].view(shape)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator)

    def groups(self, rows: int, experts: int) -> tuple[Tensor | None, list[int]]:
        """Return `ends` and `counts` of that many rows; some experts have none."""
        counts, chosen = [0] * experts, self.permutation(experts)[: self.one_of((1, 2, experts))].tolist()
        for _ in range(rows):
            counts[self.one_of(chosen)] += 1
        return (None if experts == 1 else torch.tensor([*accumulate(counts)], dtype=torch.int32)), counts


def _divided(rows: Tensor, parts: int, interleaved: bool) -> Tensor:
    """Return rows [N, P·q] as [N, P, q], or as they are if P is 1."""
    if parts == 1:
        return rows
    return rows.unflatten(1, (-1, parts)).mT if interleaved else rows.unflatten(1, (parts, -1))


def low_rank(
    draw: Draw, name: str, rows: int, experts: int, rank: int, parts: int, wide_in: int, wide_out: int, kind: str = ""
) -> Call:
    """Return one of three products (`kind`, or a random one), or the gradients: `wide_out` is the width of one part."""
    groups, interleaved = draw.groups(rows, experts), draw.one_of((False, True))
    factors = draw.one_of((torch.float32, torch.float32, draw.dtype))
    A = draw.normal(experts, parts, rank, wide_in, dtype=factors) / wide_in**0.5
    B = draw.normal(experts, parts, wide_out, rank, dtype=factors) / rank**0.5
    x, dout = draw.normal(rows, wide_in), _divided(draw.normal(rows, parts * wide_out), parts, interleaved)
    if name == "low_rank":
        kind = kind or draw.one_of(("forward", "backward", "narrow"))
        if kind == "forward":
            return name, [x, A, B, dout, torch.zeros_like(dout), *groups, 0.5]
        if kind == "backward":
            return name, [dout, B.mT, A.mT, x, torch.zeros_like(x), *groups, 0.5]
        return name, [x, A, None, None, None, *groups, 1.0]
    narrow = draw.normal(rows, parts, rank), draw.normal(rows, parts, rank)
    gradients = torch.full_like(A, 7), torch.full_like(B, 7)
    weights = draw.normal(2 * rows, dtype=draw.one_of((torch.float32, draw.dtype)))
    of_weights = draw.one_of(((weights, draw.permutation(2 * rows)[:rows]), (None, None)))
    return name, [narrow[0], x, narrow[1], dout, *gradients, *of_weights, *groups, 0.5]


def gated(draw: Draw, name: str, rows: int, intermediate: int, gate: tuple[bool, float, float]) -> Call:
    gate_up = draw.normal(rows, 2 * intermediate)
    if name == "gated":
        return name, [gate_up, *gate]
    weights = draw.normal(2 * rows, dtype=draw.one_of((torch.float32, draw.dtype)))
    order, dweights = draw.permutation(2 * rows)[:rows], draw.one_of((None, torch.zeros_like(weights)))
    return name, [gate_up, draw.normal(rows, intermediate), weights, order, dweights, *gate]


def rows(draw: Draw, name: str, tokens: int, hidden: int, top_k: int) -> Call:
    x, weights = draw.normal(tokens, hidden), draw.one_of((None, draw.normal(tokens * top_k)))
    order = draw.permutation(tokens * top_k)
    if name == "sum_rows_":
        return name, [x, draw.normal(tokens * top_k, hidden), torch.argsort(order).int(), weights]
    if name == "add_rows_":  # at most one choice of a token
        order = draw.permutation(tokens)[: draw.one_of((1, tokens))] * top_k + top_k - 1
        return name, [x, draw.normal(len(order), hidden), order, top_k, weights]
    first = draw.one_of((0, 1)) % len(order)  # from 1 on, `order` is not aligned to 16 bytes
    inverse = draw.one_of((None, torch.full((tokens * top_k,), -1, dtype=torch.int32)))
    return name, [x, order[first:], top_k, inverse]


def nf4(draw: Draw, matrices: int, shape: tuple[int, int], double_quant: bool) -> Call:
    stack = QuantizedExperts(matrices, shape, "nf4", double_quant=double_quant)
    for number in range(matrices):
        stack.quantize_(number, draw.normal(*shape, dtype=torch.float32))
    nested = (stack.nested_absmax, stack.nested_code, stack.offset) if double_quant else (None,) * 3
    return "dequantize_nf4", [stack.data, stack.absmax, *nested, shape[0] * shape[1], draw.dtype]


def int8(draw: Draw, rows: int, columns: int) -> Call:
    stack = QuantizedExperts(1, (rows, columns), "int8")
    stack.quantize_(0, draw.normal(rows, columns, dtype=torch.float32))
    return "dequantize_int8", [stack.data[0], stack.absmax[0], draw.dtype]


def fp8(draw: Draw, matrices: int, rows: int, columns: int) -> Call:
    codes = torch.arange(256, dtype=torch.uint8).repeat(-(-matrices * rows * columns // 256))
    codes[(codes & 127) == 127] = 0  # not a number
    scales = draw.normal(matrices, -(-rows // 128), -(-columns // 128), dtype=torch.float32)
    codes = codes[: matrices * rows * columns].view(matrices, rows, columns)
    powers = (torch.arange(matrices * rows * -(-columns // 32)) % 10 + 117).byte().view(matrices, rows, -1)
    kinds = (scales, 128, 128), (scales[:, :1, :1].contiguous(), 0, 0), (powers, 1, 32)
    return "dequantize_fp8", [
        codes,
        *draw.one_of((*kinds, (draw.normal(matrices, rows, 1, dtype=torch.float32), 1, 0))),
        draw.dtype,
    ]


def nvfp4(draw: Draw, matrices: int, rows: int, columns: int) -> Call:
    wide = -(-columns // 16)
    codes = torch.arange(matrices * rows * wide * 8).to(torch.uint8).view(matrices, rows, wide * 8)
    scales = torch.arange(matrices * rows * wide).remainder(127).to(torch.uint8).view(matrices, rows, wide)
    fractions = draw.normal(matrices, 2, dtype=torch.float32).abs() / 1000
    return "dequantize_nvfp4", [codes, scales, fractions, columns, draw.dtype]


def int4(draw: Draw, matrices: int, rows: int, columns: int, group: int, ordered: bool) -> Call:
    """Scales in float16 and bfloat16 by turns."""
    groups = -(-columns // (group or columns))
    codes = torch.arange(matrices * rows * 4 * -(-columns // 8)).to(torch.uint8).view(matrices, rows, -1)
    zeros = torch.arange(matrices * rows * -(-groups // 2)).mul(7).to(torch.uint8).view(matrices, rows, -1)
    half = torch.arange(matrices).remainder(2).to(torch.uint8)
    scales = draw.normal(matrices, rows, groups, dtype=torch.float32) / 100
    in_half, in_bf16 = scales.half().view(torch.int16), scales.bfloat16().view(torch.int16)
    bits = torch.where(half[:, None, None] == 1, in_half, in_bf16)
    order = (draw.permutation(matrices * columns) % groups).short().view(matrices, columns) if ordered else None
    return "dequantize_int4", [codes, bits, half, zeros, order, group, columns, draw.dtype]


def mxfp4(draw: Draw) -> Call:
    """Every byte, with every exponent whose results are normal numbers."""
    near = {torch.float32: 120, torch.bfloat16: 100, torch.float16: 12}[draw.dtype]
    exponents = torch.arange(127 - near, 128 + near, dtype=torch.uint8)
    pairs = QuantizedExperts(1, (32, 32), "mxfp4").pairs
    data = torch.arange(256, dtype=torch.uint8).repeat(len(exponents))
    return "dequantize_mxfp4", [data, exponents.repeat_interleave(16), pairs, draw.dtype]


def dtype_of(seed: int) -> torch.dtype:
    """Return the data type of the token rows of a case."""
    return random.Random(seed).choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))


def case(seed: int) -> Call:
    """Return a random call; seeds that follow each other have every operator."""
    draw = Draw(seed, dtype_of(seed))
    name, one_of = OPERATORS[seed % len(OPERATORS)], draw.one_of
    count = one_of((1, 3, 31, 32, 33, 64, 100, 257))
    if name in ("low_rank", "low_rank_gradients_"):
        if draw.dtype == torch.float32:  # whose products are emulated a number at a time
            return low_rank(draw, name, min(count, 33), one_of((1, 5)), one_of((4, 16, 20)), one_of((1, 2)), 72, 44)
        sizes = one_of((16, 72, 96, 256, 520)), one_of((16, 44, 64, 300, 1100))
        rank, parts = one_of((1, 4, 8, 16, 20, 32, 48, 64)), one_of((1, 1, 2))
        return low_rank(draw, name, count, one_of((1, 1, 2, 5, 17, 42)), rank, parts, *sizes)
    if name in ("gated", "gated_backward_"):
        return gated(draw, name, min(count, 100), one_of((8, 24, 100, 144, 768, 1500, 2880)), one_of(GATES))
    if name == "dequantize_nf4":
        shape = one_of(((64, 512), (24, 20), (96, 32), (15, 9), (33, 65), (768, 128), (1, 7)))
        return nf4(draw, one_of((1, 3)), shape, one_of((False, True)))
    if name == "dequantize_int8":
        return int8(draw, *one_of(((24, 20), (15, 9), (3, 160), (7, 4100))))
    if name == "dequantize_fp8":
        return fp8(draw, *one_of(((1, 24, 20), (2, 33, 130), (1, 130, 256))))
    if name == "dequantize_nvfp4":
        return nvfp4(draw, *one_of(((2, 24, 32), (1, 33, 7), (3, 5, 272))))
    if name == "dequantize_int4":
        return int4(
            draw, *one_of(((2, 24, 64, 32), (1, 33, 200, 64), (2, 5, 272, 128), (2, 17, 300, 0))), one_of((0, 1))
        )
    if name == "dequantize_mxfp4":
        return mxfp4(draw)
    return rows(draw, name, min(count, 64), one_of((8, 40, 100, 1024, 1030, 2880, 4096)), one_of((1, 2, 4, 8)))
