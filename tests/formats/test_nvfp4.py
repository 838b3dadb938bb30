"""NVFP4 is dequantized as by ModelOpt and compressed-tensors, and rounds to the nearest."""

import pytest
import torch
from torch import nn

from moetune.experts.quantized import QuantizedExperts
from moetune.formats import nvfp4
from tests.formats.stacks import matrices, quantized

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("at_once", [nvfp4.AT_ONCE, 1])
@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_nvfp4_is_dequantized_as_its_producers_do(producer: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte with every positive scale, by the formulas of modelopt/torch/quantization/qtensor/nvfp4_tensor.py
    (0.47) and compressed_tensors/quantization/lifecycle/forward_helpers.py (0.20)."""
    monkeypatch.setattr(nvfp4, "AT_ONCE", at_once)
    codes = torch.arange(256, dtype=torch.uint8).repeat(127).view(127, 256)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous()
    values = LEVELS[torch.stack([codes & 15, codes >> 4], -1).int()].view(127, 32, 16)
    of_matrix = torch.tensor(0.00123)
    of_blocks = scales.view(torch.float8_e4m3fn)
    if producer == "modelopt":
        of_blocks, fraction = of_blocks.float() * of_matrix, [of_matrix, 1.0]
    else:
        of_blocks, fraction = of_blocks.bfloat16() / (1 / of_matrix.view(1)), [1.0, 1 / of_matrix]
    stack = QuantizedExperts(1, (127, 512), "nvfp4")
    stack.put_quantized_(0, {"data": codes, "scales": scales, "fractions": torch.tensor(fraction)})
    expected = (values * of_blocks[..., None]).flatten(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(stack.matrix(0, dtype), expected.to(dtype))


@pytest.mark.parametrize("at_once", [nvfp4.AT_ONCE, 1])
def test_nvfp4_rounds_to_the_nearest(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a largest magnitude of 2,688 the global scale is 1; a row that is cut off is one with zeros."""
    monkeypatch.setattr(nvfp4, "AT_ONCE", at_once)
    weights = torch.linspace(-6, 6, 1600).view(100, 16) * 448
    weights[:, 0] = 6.0 * 448
    found = quantized("nvfp4", False, weights[None])
    assert found.fractions.tolist() == [[1.0, 1.0]]
    nearest = (weights.abs()[..., None] - LEVELS[:8] * 448).abs().amin(-1)
    assert torch.equal((found.matrix(0, torch.float32) - weights).abs(), nearest)
    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, *[0.0] * 8]]) * 448
    assert (quantized("nvfp4", False, ties[None]).matrix(0, torch.float32)[0, :8] / 448).tolist() == [
        6, 0, 1, 1, 2, 2, 4, 4,
    ]  # fmt: skip

    small = matrices((33, 20), 1)
    cut, whole = quantized("nvfp4", False, small), quantized("nvfp4", False, nn.functional.pad(small, (0, 12)))
    assert torch.equal(cut.matrix(0, torch.float32), whole.matrix(0, torch.float32)[:, :20])
    assert (cut.matrix(0, torch.float32) - small[0]).norm() < 0.12 * small[0].norm()
    zeros = quantized("nvfp4", False, torch.zeros(1, 3, 16))
    assert not zeros.matrix(0, torch.float32).any()
