"""int8 is bitsandbytes' to the bit."""

import bitsandbytes.functional as bnb
import pytest
import torch

from moetune.formats import int8
from tests.formats.stacks import every_shape, matrices, quantized


@every_shape
@pytest.mark.parametrize("at_once", [int8.AT_ONCE, 24])
def test_an_int8_slice_is_what_bitsandbytes_makes_of_that_matrix(
    shape: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "AT_ONCE", at_once)
    weights = matrices(shape)
    stack = quantized("int8", False, weights)
    for index, weight in enumerate(weights):
        data, scale, _ = bnb.int8_vectorwise_quant(weight.half())
        assert torch.equal(stack.data[index], data)
        assert torch.equal(stack.absmax[index], scale)
        assert torch.equal(stack.matrix(index, torch.float32), bnb.int8_vectorwise_dequant(data, scale))
