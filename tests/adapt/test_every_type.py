"""Every mixture of experts that transformers can build trains with the gradients of its plain self, or says why not.

Each toy mixes all ways to train: its routers and norms, two whole experts a layer, LoRA on its default targets.
The base is NF4, small linear layers included. The reference and its tolerance are in tests/reference.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from moetune.adapt.build import Adapted
from moetune.experts.bank import ExpertBank
from tests.reference import (
    TOLERANCE,
    assert_close,
    build_toy,
    loss_and_gradients,
    reference_loss_and_gradients,
    small_linears_are_quantized,
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
PLAIN = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""The usual ways to write a mixture of experts: run on every push, beside every sixth of the others."""
every_type = pytest.mark.parametrize(
    "model_type",
    thinned(
        (name for name in (*expert_model_types(), "step3p7", "llama4_text", "llama4") if name not in CANNOT_RUN),
        6,
        PLAIN,
    ),
)


def small(model_type: str) -> PretrainedConfig:
    """The toy; where attention is sparse it has 8 heads choose 4 of 12 tokens, so that what chooses them matters."""
    config = toy_config(model_type)
    sparse = {"index_topk": 4, "index_n_heads": 8}
    return toy_config(model_type, **sparse) if sparse.keys() <= config.to_dict().keys() else config


def adapted_toy(model_type: str, folder: Path, **more: Any) -> Adapted:
    adapt = {
        "router": "all",
        "experts": {"ids": [0, 3]},
        "lora": {"rank": 2, "alpha": 4, "gate_up": "split"},
        "also": ["norm"],
    }
    with small_linears_are_quantized():
        return build_toy(small(model_type), folder, adapt, **more)


@pytest.mark.one_in(6)
@pytest.mark.slow
@every_type
def test_loss_and_gradients_equal_those_of_the_plain_model(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_toy(model_type, tmp_path)
    loss, gradients = loss_and_gradients(adapted, token_ids())
    expected_loss, expected = reference_loss_and_gradients(adapted, token_ids())
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=0)
    assert_close(gradients, expected, TOLERANCES.get(model_type, TOLERANCE))

    assert gradients.keys() == adapted.trainable().keys()


@pytest.mark.one_in(12)
@pytest.mark.slow
@every_type
def test_checkpointing_replays_the_choice_of_experts_and_changes_no_bit(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_toy(model_type, tmp_path)
    adapted.model.train()  # checkpoints act in training mode only; dropout and jitter draw alike
    torch.manual_seed(0)
    _, plain = loss_and_gradients(adapted, token_ids())
    adapted.model.activation_checkpointing_enable()
    torch.manual_seed(0)
    _, checkpointed = loss_and_gradients(adapted, token_ids())
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)

    first: dict[str, torch.Tensor] = {}
    again: dict[str, torch.Tensor] = {}
    chosen = first
    for layer in adapted.structure.moe_layers:
        bank = adapted.model.get_submodule(layer.experts)
        assert isinstance(bank, ExpertBank)

        def note(_: object, args: tuple, kwargs: dict, path: str = layer.experts) -> None:
            chosen[path] = (*args, *kwargs.values())[1].clone()

        bank.register_forward_pre_hook(note, with_kwargs=True)
    adapted.model.zero_grad()
    loss = adapted.model(input_ids=token_ids(), use_cache=False).logits.square().sum()
    for part in adapted.structure.parameters_of("router"):  # routers that would now choose otherwise
        adapted.model.get_parameter(part.name).data.mul_(-1.0)
    chosen = again
    loss.backward()
    assert first.keys() == {layer.experts for layer in adapted.structure.moe_layers}
    assert again.keys() == first.keys()
    for path, ids in first.items():
        assert torch.equal(again[path], ids), path


def test_the_exceptions_are_types_that_exist() -> None:
    types = {*CANNOT_RUN, *TOLERANCES}
    assert types <= set(expert_model_types())
