"""Models that keep packed documents apart, and models that do not."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from moetune.errors import UserError
from moetune.training.isolation import refuse_leaky_packing
from tests.toys import toy_model


def excited(model_type: str, **config: Any) -> PreTrainedModel:
    """A toy with weights large enough to show what reaches what."""
    model = toy_model(model_type, **config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_models_that_isolate_documents_pass_and_are_left_as_they_were(model_type, attention):
    model = excited(model_type, attn_implementation=attention).train()
    state = torch.get_rng_state()
    for micro_batch in (1, 3):
        refuse_leaky_packing(model, micro_batch, 16)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_experts_stay_in_place_for_whoever_notes_modules_in_the_first_forward_pass():
    """FSDP2 does: a bank it misses becomes a root of its own, whose gradients' buffers stay."""
    model = excited("mixtral")
    there = [*model.named_modules()]
    model.model.register_forward_pre_hook(lambda *_: seen.append([*model.named_modules()]))
    seen: list[list[tuple[str, torch.nn.Module]]] = []
    forwards = [module.forward for _, module in there]
    refuse_leaky_packing(model, 1, 16)
    assert seen == [there, there]
    assert [module.forward for _, module in there] == forwards


def test_models_that_mix_documents_are_refused():
    model = excited("mixtral")
    decoder = model.model.forward
    # What gpt_oss does in transformers 5.23: its mask never hears of the positions.
    model.model.forward = lambda position_ids, **inputs: decoder(**inputs)
    with pytest.raises(
        UserError, match="mixtral with attention sdpa and 2 sequences of 16 tokens a batch lets one packed doc"
    ):
        refuse_leaky_packing(model, 2, 16)
    model.model.forward = decoder
    refuse_leaky_packing(model, 2, 16)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        (
            "minimax_m3_vl_text",
            {"index_block_size": 4, "index_topk_blocks": 2, "layer_types": ["minimax_m3_sparse"] * 4},
        ),
        ("deepseek_v4", {}),
        ("jamba", {}),
    ],
)
def test_models_whose_choices_or_blocks_mix_documents_are_refused_at_the_length_that_trains(model_type, sizes):
    model = excited(model_type, **sizes)
    with pytest.raises(UserError, match="64 tokens a batch lets one packed document see another"):
        refuse_leaky_packing(model, 1, 64)


def test_an_indexer_whose_choice_sees_the_mask_passes():
    refuse_leaky_packing(toy_model("deepseek_v32", index_topk=8, index_n_heads=64), 1, 64)
