"""What only a GPU can show of the kernels: they give what torch's operations give."""

import pytest
import torch

from moetune.adapt.guard.comparison import compare
from moetune.planning.doctor import samples

CARD = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_give_what_torch_gives(dtype: str) -> None:
    verdict = compare(CARD, [*samples(dtype)])
    assert not verdict.stopped
    assert verdict.failed == {}
