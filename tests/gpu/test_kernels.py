"""What only a GPU can show of the kernels: they give what torch's operations give."""

import pytest
import torch

from moetune.adapt.guard import Key, compare
from moetune.adapt.guard.exercise import samples

CARD = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_give_what_torch_gives(dtype: torch.dtype) -> None:
    verdict = compare(Key.of(CARD, samples(dtype)), CARD)
    assert verdict.is_complete, verdict.stopped
    assert verdict.failed == {}
