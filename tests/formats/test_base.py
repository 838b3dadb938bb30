"""Rounding with the scales that are stored: what does not change keeps its bytes."""

from typing import get_args

import pytest
import torch

from moetune.config.schema import Storage
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.table import FORMATS


@pytest.mark.parametrize("storage", ["fp8", "fp8-row", "nvfp4", "mxfp4", "int4-g32"])
def test_weights_of_a_quantized_matrix_keep_their_bytes(storage: Storage) -> None:
    """Of blocks whose largest code is not the largest that there is; and a weight that is too large has a new scale."""
    stack = QuantizedExperts(1, (130, 160), storage)
    stack.quantize_(0, torch.randn(130, 160) * torch.logspace(-3, 0, 130)[:, None])
    most = 126 if stack.scales.dtype == torch.uint8 else 2**15 - 1
    stack.scales.copy_(stack.scales * 3 if storage.startswith("fp8") else (stack.scales + 1).clamp(max=most))
    before = stack.matrix(0, torch.float32)
    data, scales = stack.data[0].clone(), stack.scales[0].clone()

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        stack.format.quantize(weight, {name: buffer[0] for name, buffer in stack.named_buffers()}, keep=True)
        return stack.matrix(0, torch.float32)

    assert torch.equal(rounded(before), before)
    assert torch.equal(stack.data[0], data)
    assert torch.equal(stack.scales[0], scales)
    assert torch.equal(rounded(before * (1 + 1e-4)), before)
    large = before.clone()
    large[1, 3] = 3 * before[:17, :16].abs().max()
    assert rounded(large)[1, 3] == pytest.approx(float(large[1, 3]), rel=0.2)
    assert torch.equal(stack.data[0].flatten()[-100:], data.flatten()[-100:])


def test_every_value_of_model_base_has_its_format() -> None:
    assert [*FORMATS] == [*get_args(Storage)]
    assert all(format.name == name for name, format in FORMATS.items())
