"""Weights that are not quantized: bf16 and fp32."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from moetune.formats.base import Format, Sizes


class Plain(Format):
    """Weights in a floating-point dtype. Dequantizing is a cast, or a view of the data."""

    dtype: ClassVar[torch.dtype]

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        return {"data": (self.dtype, (count, *shape))}

    def quantize(self, weight: Tensor, row: Mapping[str, Tensor]) -> None:
        row["data"].copy_(weight)

    def dequantize(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return stored["data"].to(dtype)


class Bf16(Plain):
    """bfloat16."""

    name, formula, dtype = "bf16", "2·n", torch.bfloat16


class Fp32(Plain):
    """float32."""

    name, formula, dtype = "fp32", "4·n", torch.float32
