"""bitsandbytes on a CPU is exact as mended here, whatever the length of a row, and is still wrong without."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor

from moetune.experts import bitsandbytes_cpu

SHAPES = [(64, 64), (64, 96), (6, 80), (5, 100), (5, 33)]


def by_hand(packed: Tensor, state: bnb.QuantState) -> Tensor:
    """The matrix, from the definition: two levels in a byte, high one first; one scale for 64 weights."""
    bytes_ = packed.flatten().long()
    levels = state.code[torch.stack([bytes_ >> 4, bytes_ & 15], 1).flatten()]
    weights = torch.Size(state.shape).numel()
    return (levels[:weights] * state.absmax.repeat_interleave(64)[:weights]).view(state.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_comes_back_by_definition(shape: tuple[int, int]) -> None:
    packed, state = bnb.quantize_4bit(matrix(shape), quant_type="nf4")
    assert torch.equal(bnb.dequantize_4bit(packed, state), by_hand(packed, state))


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_4bit_multiplies_with_that_matrix(shape: tuple[int, int], double_quant: bool) -> None:
    """Forward, backward, and without gradients, which is another path in bitsandbytes."""
    layer = Linear4bit(shape[1], shape[0], bias=False, quant_type="nf4", compress_statistics=double_quant)
    layer.weight = Params4bit(matrix(shape), requires_grad=False, quant_type="nf4", compress_statistics=double_quant)
    layer.to("cpu")
    packed, state = layer.weight.data, layer.weight.quant_state
    if double_quant:
        state = bnb.QuantState(
            bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset,
            shape=state.shape, code=state.code, blocksize=64, quant_type="nf4", dtype=torch.float32,
        )  # fmt: skip
    weight = by_hand(packed, state)
    x = torch.randn(3, shape[1], requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, x @ weight.T)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], weight.sum(0).expand(3, -1))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ weight.T)


def test_upstream_is_still_wrong() -> None:
    """If this fails, bitsandbytes is mended: delete bitsandbytes_cpu.py and its entry in docs/reference/upstream.md."""
    packed, state = bnb.quantize_4bit(matrix((64, 96)), quant_type="nf4")
    found = bitsandbytes_cpu._upstream.call_boxed(
        bitsandbytes_cpu._CPU, packed, state.absmax, 64, "nf4", state.shape, torch.float32
    )
    assert (found - by_hand(packed, state)).abs().max() > 1


def matrix(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
