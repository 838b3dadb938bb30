"""What `generate --predict` counts: keys and values of every prompt of a batch, prompt and new tokens together."""

import pytest

from moetune.errors import UserError
from moetune.inference.memory import predict_generate
from moetune.inference.opened import find


@pytest.mark.full
def test_keys_and_values_of_a_batch() -> None:
    """Eight prompts with 1,024 tokens more each need 1 GiB more: 32 layers, 8 heads of 128, keys and values, bf16.

    At the peak attention also holds its mask, and a layer's keys repeated for its 32 query heads: less than a tenth.
    """
    found = find("mixtral-8x7b", base="nf4", device="cuda")
    few, many = (predict_generate(found, 512, new, batch=8, gpu="l40s") for new in (1024, 2048))
    assert few.fits
    more = many.fullest.peak_allocated - few.fullest.peak_allocated
    cached = 8 * 1024 * 32 * 8 * 128 * 2 * 2
    assert cached <= more <= 1.1 * cached


def test_a_prompt_that_takes_every_position() -> None:
    found = find("mixtral-8x7b", base="nf4", device="cuda")
    with pytest.raises(UserError, match=r"32,768 tokens leaves no position of 'mixtral-8x7b' for another"):
        predict_generate(found, 32_768, 16, gpu="l40s")
