"""Weights that are not quantized are cast."""

import pytest
import torch

from moetune.config.schema import Storage
from moetune.run.dtypes import DTYPES
from tests.formats.stacks import every_shape, matrices, quantized


@every_shape
@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_a_plain_slice_is_a_cast(shape: tuple[int, int], storage: Storage) -> None:
    weights = matrices(shape)
    stack = quantized(storage, False, weights)
    for index, weight in enumerate(weights):
        assert torch.equal(stack.matrix(index, torch.float32), weight.to(DTYPES[storage]).float())
