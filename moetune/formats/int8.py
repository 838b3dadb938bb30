"""int8: 8 bits a weight, a float32 scale for each row, as bitsandbytes quantizes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moetune.compat.bitsandbytes import functional as bnb
from moetune.formats.base import Format, Rows, Sizes
from moetune.kernels import AT_ONCE, INT8_STEP
from moetune.kernels.operators import operator


def _slices(shape: Sequence[int]) -> list[slice]:
    """Return slices that divide the rows of a matrix [R, C]: at most `AT_ONCE` weights each, or one row."""
    rows = max(1, AT_ONCE // shape[1])
    return [slice(first, first + rows) for first in range(0, shape[0], rows)]


@operator(lambda data, absmax, dtype: torch.empty_like(data, dtype=dtype))
def dequantize_int8(data: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize int8 rows [n, C] with scales `absmax` [n] float32: [n, C] in `dtype`.

    Bit for bit bitsandbytes' `int8_vectorwise_dequant`. torch's operations need at most 16 MiB besides the result for
    rows of up to `AT_ONCE` weights; those of bitsandbytes need 8 bytes per weight.
    """
    out = torch.empty_like(data, dtype=dtype)
    if dtype == torch.float32:
        return torch.mul(data, absmax[:, None], out=out).mul_(INT8_STEP)
    slices = _slices(data.shape)
    wide = torch.empty_like(out[slices[0]], dtype=torch.float32)
    for rows in slices:
        part = out[rows]
        part.copy_(torch.mul(data[rows], absmax[rows, None], out=wide[: len(part)]).mul_(INT8_STEP))
    return out


class Int8(Format):
    """8 bits a weight, with a float32 scale for each row of a matrix."""

    name, bits = "int8", 8

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        return {"data": (torch.int8, (count, *shape)), "absmax": (torch.float32, (count, shape[0]))}

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        # bitsandbytes' CUDA kernel accepts only float16; the CPU gets it too, so both store the same bytes.
        for rows in _slices(weight.shape):
            data, scale, _ = bnb.int8_vectorwise_quant(weight[rows].to(torch.float16))
            row["data"][rows].copy_(data)
            row["absmax"][rows].copy_(scale)

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        data, absmax = stored["data"], stored["absmax"]
        weights: Tensor = dequantize_int8(data.flatten(0, 1), absmax.flatten(), dtype).view(data.shape)
        return weights
