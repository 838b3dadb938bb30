"""Rotated heads: torch's operations are transformers'."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from moetune.kernels import rotary as kernels
from tests.kernels.test_operators import random


def heads(rows: int, count: int, length: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    return random(rows, length, count, size, dtype=dtype, seed=seed).transpose(1, 2)


def is_laid_out_by_token(x: Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("angles", [1, 2])
def test_without_norms_both_ways_are_bit_for_bit_transformers(dtype: torch.dtype, angles: int) -> None:
    q, k = (heads(2, count, 5, 12, dtype, count).requires_grad_() for count in (4, 2))
    cos, sin = (random(angles, 5, 12, dtype=dtype, seed=seed) for seed in (7, 8))
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    dout = [torch.randn_like(one) for one in expected]
    found = kernels.rotate(q.detach(), k.detach(), cos, sin, None, None, 0.0)
    gradients = kernels.rotate_backward(*dout, None, None, cos, sin, None, None, 0.0)
    for one, other in zip((*found, *gradients), (*expected, *torch.autograd.grad(expected, (q, k), dout)), strict=True):
        assert torch.equal(one, other)
        assert is_laid_out_by_token(one)


def test_norms_are_those_of_float64_within_1e_6() -> None:
    q, k = (heads(2, count, 5, 12, torch.float32, count) for count in (4, 2))
    cos, sin = (random(1, 5, 12, seed=seed) for seed in (7, 8))
    weights = random(12, seed=9), random(12, seed=10)
    dout = [torch.randn_like(x) for x in (q, k)]
    found = kernels.rotate(q, k, cos, sin, *weights, 1e-5)
    gradients = kernels.rotate_backward(*dout, q, k, cos, sin, *weights, 1e-5)
    wide = [x.double().requires_grad_() for x in (q, k)]
    normed = [w * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for x, w in zip(wide, weights, strict=True)]
    expected = apply_rotary_pos_emb(*normed, cos.double(), sin.double())
    of_inputs = torch.autograd.grad(expected, wide, [one.double() for one in dout])
    for one, other in zip((*found, *gradients), (*expected, *of_inputs), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
