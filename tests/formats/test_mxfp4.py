"""MXFP4 is dequantized as by transformers, and rounds to the nearest."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moetune.experts.quantized import QuantizedExperts
from moetune.formats import mxfp4
from tests.formats.stacks import quantized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("at_once", [mxfp4.UNPACKED_AT_ONCE, 96])
def test_mxfp4_is_dequantized_as_transformers_does(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every byte and every scale, to the bit: zeros keep their sign, and what is infinite or none stays so."""
    monkeypatch.setattr(mxfp4, "UNPACKED_AT_ONCE", at_once)
    blocks = torch.arange(256, dtype=torch.uint8).repeat(256).view(2, 32, 64, 16)
    scales = torch.arange(256, dtype=torch.uint8).repeat(16).view(2, 32, 64)
    blocks = blocks[..., torch.randperm(16)]
    stack = QuantizedExperts(2, (32, 2048), "mxfp4")
    for index in range(2):
        stack.put_quantized_(index, {"data": blocks[index].flatten(), "scales": scales[index].flatten()})
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT.contiguous()
    assert torch.equal(stack.matrices(slice(0, 2), dtype).view(bits), expected.view(bits))


def test_mxfp4_rounds_to_the_nearest_and_loses_nothing_of_its_own() -> None:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    weights = torch.linspace(-6, 6, 3200).view(100, 32)
    weights[:, 0] = 6.0  # of every block the largest
    stack = quantized("mxfp4", False, weights[None])
    nearest = (weights.abs()[..., None] - levels).abs().amin(-1)
    assert torch.equal((stack.matrix(0, torch.float32) - weights).abs(), nearest)
    assert torch.equal(quantized("mxfp4", False, weights[None] * 2**-20).data, stack.data)

    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, *[0.0] * 24]])
    assert quantized("mxfp4", False, ties[None]).matrix(0, torch.float32)[0, :8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]

    blocks = torch.randint(0, 256, (1, 40, 4, 16), dtype=torch.uint8)
    scales = torch.randint(3, 250, (1, 40, 4), dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
    assert torch.equal(quantized("mxfp4", False, values).matrix(0, torch.float32), values[0])
