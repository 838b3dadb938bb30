"""FP8 in blocks is transformers' to the bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from moetune.experts.quantized import QuantizedExperts
from moetune.formats import fp8
from tests.formats.stacks import matrices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_is_dequantized_as_transformers_does(dtype: torch.dtype) -> None:
    """Of every byte, two blocks high and three wide, to the bit."""
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(256 * 384) % 256].view(1, 256, 384)
    scales = torch.randn(1, 2, 3)
    stack = QuantizedExperts(1, (256, 384), "fp8")
    stack.put_quantized_(0, {"data": codes[0], "scales": scales[0]})
    expected = Fp8Dequantize(None)._dequantize_one(codes.view(torch.float8_e4m3fn), scales, dtype)
    torch.testing.assert_close(stack.matrix(0, dtype), expected[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("at_once", [fp8.AT_ONCE, 1])
@pytest.mark.parametrize("pieces", [1, 2])
def test_fp8_is_quantized_as_transformers_does(pieces: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up together or apart; and blocks that are cut off as whole ones whose other weights are zero."""
    monkeypatch.setattr(fp8, "AT_ONCE", at_once)
    stock: Any = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    weight = matrices((512, 384), 1)[0].to(torch.bfloat16)
    weight[:128, :128] = 0
    stack = QuantizedExperts(1, (512, 384), "fp8", pieces=pieces)
    stack.quantize_(0, weight)
    expected = stock._quantize_one("weight", weight)
    assert torch.equal(stack.data.view(512, 384), expected["weight"].view(torch.uint8))
    assert torch.equal(stack.scales.view(4, 3), expected["weight_scale_inv"])

    cut = QuantizedExperts(1, (300, 200), "fp8")
    cut.quantize_(0, weight[200:500, :200])
    whole = torch.zeros(384, 256, dtype=torch.bfloat16)
    whole[:300, :200] = weight[200:500, :200]
    expected = stock._quantize_one("weight", whole)
    assert torch.equal(cut.data[0], expected["weight"].view(torch.uint8)[:300, :200])
    assert torch.equal(cut.scales[0], expected["weight_scale_inv"])
