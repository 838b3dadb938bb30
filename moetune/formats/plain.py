"""Weights that are not quantized: bf16 and fp32."""

import torch
from torch import Tensor

from moetune.config.schema import Storage
from moetune.formats.base import Format, Rows, Sizes


class Plain(Format):
    """Weights in a floating-point dtype. Dequantizing is a cast, or a view of the data."""

    dtype: torch.dtype
    quantizes_linears = False

    def __init__(self, name: Storage, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.bits = 8 * dtype.itemsize

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        return {"data": (self.dtype, (count, *shape))}

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        row["data"].copy_(weight)

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return stored["data"].to(dtype)


PLAIN = (Plain("bf16", torch.bfloat16), Plain("fp32", torch.float32))
