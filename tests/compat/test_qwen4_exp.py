"""Qwen3.8's keys chosen at once are those that its own code chooses for one query after another."""

import copy

import pytest
import torch

from moetune.compat.qwen4_exp import choose_all_at_once
from tests.toys import toy_model


@pytest.mark.parametrize(("tokens", "at_once"), [(16, True), (17, True), (18, False)])  # a budget of 16, blocks of 2
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chosen_at_once(tokens: int, at_once: bool, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model("qwen4_exp_text")
    model.set_attn_implementation(attention)
    ids = torch.randint(96, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    changed = copy.deepcopy(model)
    choose_all_at_once(changed)
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    if at_once:  # its own code asks which keys a query sees
        monkeypatch.setattr(torch, "nonzero", None)
    assert torch.equal(changed(input_ids=ids, attention_mask=mask, use_cache=False).logits, expected)
