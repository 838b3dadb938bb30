"""Every mixture of experts that transformers can build trains with the gradients of its plain self, or says why not.

Each toy mixes all ways to train: its routers and norms, two whole experts a layer, LoRA on the others and on attention.
The base is NF4, small linear layers included. The reference and its tolerance are in tests/reference.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from moetune.adapt.build import Adapted
from moetune.adapt.checkpointing import enable_checkpointing
from moetune.experts.bank import ExpertBank
from tests.reference import (
    TOLERANCE,
    assert_close,
    build_toy,
    loss_and_gradients,
    reference_loss_and_gradients,
    small_linears_are_packed,
    token_ids,
)
from tests.thinned import thinned
from tests.toys import expert_model_types, toy_config

CANNOT_RUN: dict[str, str] = {}
"""Type -> why its toy cannot be adapted or run at all."""

TOLERANCES = {
    # In these toys a change of the weights' last bit (6e-8) moves the plain model's own gradients by 1e-4, and merging
    # low-rank factors into a weight is such a change. Without LoRA they meet the tolerance of the others.
    "gemma4": 5e-4,
    "gemma4_text": 5e-4,
}
LORA_TARGETS = {
    # Their Mamba layers read the weights of some linear layers without calling them, and LoRA there is refused.
    "granitemoehybrid": ["in_proj"],
    "jamba": ["in_proj"],
    "nemotron_h": ["in_proj"],
}
UNREACHED = {
    # What only chooses among tokens or experts, by comparison: autograd gives it no gradient in the plain model either.
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "qwen4_exp", "qwen4_exp_text"), ".indexer."),
    "deepseek_v4": ".self_attn.compressor.",
    "afmoe": ".expert_bias",
    "ernie4_5_moe": ".e_score_correction_bias",
    "laguna": ".e_score_correction_bias",
}

PLAIN = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""The usual ways to write a mixture of experts: run on every push, beside every fourth of the others."""
every_type = pytest.mark.parametrize(
    "model_type", thinned((name for name in expert_model_types() if name not in CANNOT_RUN), 4, PLAIN)
)


def small(model_type: str) -> PretrainedConfig:
    """The toy; where attention is sparse it has 8 heads choose 4 of 12 tokens, so that what chooses them matters."""
    config = toy_config(model_type)
    sparse = {"index_topk": 4, "index_n_heads": 8}
    return toy_config(model_type, **sparse) if sparse.keys() <= config.to_dict().keys() else config


def adapted_toy(model_type: str, folder: Path, **more: Any) -> Adapted:
    targets = [*LORA_TARGETS.get(model_type, ["attention"]), "experts"]
    adapt = {
        "router": "all",
        "experts": {"ids": [0, 3]},
        "lora": {"rank": 2, "alpha": 4, "targets": targets, "gate_up": "split"},
        "also": ["norm"],
    }
    with small_linears_are_packed():
        return build_toy(small(model_type), folder, adapt, **more)


@pytest.mark.slow
@every_type
def test_loss_and_gradients_equal_those_of_the_plain_model(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_toy(model_type, tmp_path)
    loss, gradients = loss_and_gradients(adapted, token_ids())
    expected_loss, expected = reference_loss_and_gradients(adapted, token_ids())
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=0)
    assert_close(gradients, expected, TOLERANCES.get(model_type, TOLERANCE))

    without = sorted(adapted.trainable().keys() - gradients.keys())
    unreached = UNREACHED.get(model_type)
    assert all(unreached is not None and unreached in name for name in without), without
    assert bool(without) == (unreached is not None)


@pytest.mark.slow
@every_type
def test_checkpointing_replays_the_choice_of_experts_and_changes_no_bit(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_toy(model_type, tmp_path)
    adapted.model.train()  # checkpoints act in training mode only; dropout and jitter draw alike
    torch.manual_seed(0)
    _, plain = loss_and_gradients(adapted, token_ids())
    enable_checkpointing(adapted.model)
    torch.manual_seed(0)
    _, checkpointed = loss_and_gradients(adapted, token_ids())
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)

    first: dict[str, torch.Tensor] = {}
    again: dict[str, torch.Tensor] = {}
    chosen = first
    for layer in adapted.anatomy.moe_layers:
        bank = adapted.model.get_submodule(layer.experts)
        assert isinstance(bank, ExpertBank)

        def note(_: object, args: tuple, kwargs: dict, path: str = layer.experts) -> None:
            chosen[path] = (*args, *kwargs.values())[1].clone()

        bank.register_forward_pre_hook(note, with_kwargs=True)
    adapted.model.zero_grad()
    loss = adapted.model(input_ids=token_ids(), use_cache=False).logits.square().sum()
    for part in adapted.anatomy.parts_of("router"):  # routers that would now choose otherwise
        adapted.model.get_parameter(part.name).data.mul_(-1.0)
    chosen = again
    loss.backward()
    assert first.keys() == {layer.experts for layer in adapted.anatomy.moe_layers}
    assert again.keys() == first.keys()
    for path, ids in first.items():
        assert torch.equal(again[path], ids), path


def test_the_exceptions_are_types_that_exist() -> None:
    types = {*CANNOT_RUN, *TOLERANCES, *LORA_TARGETS, *UNREACHED}
    assert types <= set(expert_model_types())
