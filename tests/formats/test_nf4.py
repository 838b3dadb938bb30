"""NF4 is bitsandbytes' to the bit."""

import bitsandbytes.functional as bnb
import pytest
import torch

from tests.formats.stacks import every_shape, matrices, quantized


@every_shape
@pytest.mark.parametrize("double_quant", [False, True])
def test_an_nf4_slice_is_what_bitsandbytes_makes_of_that_matrix(shape: tuple[int, int], double_quant: bool) -> None:
    weights = matrices(shape)
    stack = quantized("nf4", double_quant, weights)
    for index, weight in enumerate(weights):
        data, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=double_quant)
        assert torch.equal(stack.data[index], data.view(-1))
        assert torch.equal(stack.absmax[index], state.absmax)
        if double_quant:
            assert torch.equal(stack.nested_absmax[index], state.state2.absmax)
            assert torch.equal(stack.offset[index], state.offset)
            assert torch.equal(stack.nested_code, state.state2.code)
        state.shape = torch.Size([weight.numel()])  # flat, the CPU's kernel is exact (its finding)
        assert torch.equal(stack.matrix(index, torch.float32), bnb.dequantize_4bit(data, state).view(shape))
