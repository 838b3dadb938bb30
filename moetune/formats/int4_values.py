"""INT4 in memory: 4-bit codes, scale and zero point of each group of columns."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.kernels import AT_ONCE
from moetune.kernels.operators import operator


@operator(lambda data, *more: data.new_empty((*data.shape[:2], more[-2]), dtype=more[-1]))
def dequantize_int4(
    data: Tensor, scales: Tensor, half: Tensor, zeros: Tensor, order: Tensor | None, group: int, columns: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Dequantize matrices of 4-bit numbers: [n, R, C] in `dtype`.

    (code - zero) · scale is computed in float32, where it is exact, and rounded once: for the scales' own dtype bit for
    bit as by compressed-tensors, gptqmodel and AutoRound. torch's operations compute `AT_ONCE` weights at a time.

    Args:
        data: [n, R, 4·⌈C / 8⌉] uint8, two codes per byte, the first in the low bits.
        scales: [n, R, G] int16, the bits of the scales: of float16 where `half` [n] uint8 is 1, else of bfloat16.
        zeros: [n, R, ⌈G / 2⌉] uint8, a code for each group, two per byte.
        order: [n, C] int16, the group of each column; None if `group` consecutive columns share one.
        group: columns of a group; 0 for all columns of a row.
        columns: C.
    """
    out = data.new_empty((*data.shape[:2], columns), dtype=dtype)
    for number, result in enumerate(out):
        groups = group_of(columns, group, data.device) if order is None else order[number].int()
        of_matrix = scales[number].view(torch.float16 if half[number] else torch.bfloat16)
        high = max(1, AT_ONCE // columns)
        parts = (tensor.split(high) for tensor in (data[number], of_matrix, zeros[number], result))
        for codes, of_rows, of_zeros, rows in zip(*parts, strict=True):
            weights = unpacked(codes, columns).float()
            weights -= unpacked(of_zeros, of_rows.shape[1]).float()[:, groups]
            rows.copy_(weights.mul_(of_rows.float()[:, groups]))
    return out


def group_of(columns: int, group: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the number of the group of each column, [C] int32; `group` columns share one, 0 for all of them."""
    return torch.arange(columns, dtype=torch.int32, device=device) // (group or columns)


def unpacked(data: Tensor, count: int) -> Tensor:
    """Return the first `count` codes of 4 bits, [..., count] uint8, of bytes [..., n], the first in the low bits."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)[..., :count]


def packed(codes: Tensor) -> Tensor:
    """Return codes [..., n] uint8 as bytes [..., ⌈n / 2⌉], the first in the low bits."""
    codes = pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., ::2] | codes[..., 1::2] << 4
