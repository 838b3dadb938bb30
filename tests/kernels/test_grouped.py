"""Whose kernel multiplies the groups of experts on which card."""

import pytest
import torch

from moetune.kernels.grouped import kernel_of


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "whose"),
    [
        ((7, 5), torch.float16, 24, None),
        ((8, 0), torch.bfloat16, 24, "triton"),
        ((8, 6), torch.bfloat16, 21, "triton"),
        ((8, 9), torch.float16, 24, "triton"),
        ((8, 6), torch.float32, 24, None),
        ((9, 0), torch.bfloat16, 24, "torch"),
        ((9, 0), torch.bfloat16, 21, None),
        ((9, 0), torch.float16, 24, None),
        ((10, 0), torch.bfloat16, 24, "triton"),
        ((12, 0), torch.bfloat16, 24, "triton"),
    ],
)
def test_kernel_of(capability: tuple[int, int], dtype: torch.dtype, width: int, whose: str | None) -> None:
    rows, matrices = torch.empty(8, 16, dtype=dtype), torch.empty(3, 16, width, dtype=dtype)
    assert kernel_of(capability, rows, matrices) == whose
