"""What only a GPU can show of the expert bank's kernels: they give what torch's operations give."""

import pytest
import torch

from moetune.experts.kernels import operators as kernels
from moetune.experts.kernels.self_check import differing


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_give_what_torch_gives(dtype: torch.dtype) -> None:
    module = kernels.on_gpu()
    assert module is not None
    assert differing(module, torch.device("cuda", 0), dtype) == []
