"""Matrices to quantize, and the stack that holds them quantized."""

import pytest
import torch
from torch import Tensor

from moetune.config.schema import Storage
from moetune.experts.quantized import QuantizedExperts

# One block; no whole number of blocks; an odd number of weights; more blocks than share a second-level scale.
SHAPES = [(8, 8), (6, 20), (5, 13), (40, 512)]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def matrices(shape: tuple[int, int], count: int = 3) -> Tensor:
    torch.manual_seed(0)
    scales = torch.tensor([1e-3, 1.0, 50.0])[:count, None, None]
    return torch.randn(count, *shape) * scales


def quantized(storage: Storage, double_quant: bool, weights: Tensor) -> QuantizedExperts:
    stack = QuantizedExperts(len(weights), tuple(weights.shape[1:]), storage, double_quant=double_quant)
    for index in torch.randperm(len(weights)).tolist():  # in whatever order a loader delivers them
        stack.quantize_(index, weights[index])
    return stack
