"""Random weights: every tensor is drawn, as the model's authors draw it, and nothing drawn is drawn twice."""

from pathlib import Path

import pytest
import torch
from torch import nn

from moetune.adapt.weights.random import realize
from moetune.errors import UserError
from moetune.models.structure import meta_model
from tests.reference import run_config, small_linears_are_quantized
from tests.resolved import build
from tests.thinned import thinned
from tests.toys import expert_model_types, toy_config, toy_model

# The rule of the block around these would draw them anew: zeros, and smaller with depth. Their layer's own rule stands.
TWICE = {"afmoe": "router.gate.weight", "nemotron_h": "mixer.out_proj.weight"}


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("base", ["nf4", "fp32"])
@pytest.mark.parametrize("model_type", thinned(expert_model_types(), 6, TWICE))
def test_no_tensor_is_left_on_meta_or_undrawn(model_type: str, base: str, tmp_path: Path) -> None:
    toy_config(model_type).save_pretrained(tmp_path)
    with small_linears_are_quantized():
        model = build(run_config(tmp_path, {"router": "all"}, model={"base": base}), "cpu").model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert not tensor.is_meta, name
        assert not tensor.is_floating_point() or not tensor.isnan().any(), name
    if base == "fp32":
        stock = toy_model(model_type)
        kept = {name: buffer for name, buffer in stock.named_buffers() if name in dict(model.named_buffers())}
        for name, buffer in kept.items():  # position tables, scales: not random, so the same in both
            torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)
        spread = {name: parameter.std().item() for name, parameter in model.named_parameters()}
        for name, parameter in stock.named_parameters():
            if name in spread and parameter.numel() > 200 and not name.endswith(TWICE.get(model_type, "\0")):
                assert spread[name] == pytest.approx(parameter.std().item(), rel=0.35, abs=1e-8), name


def test_the_seed_decides(tmp_path: Path) -> None:
    toy_config("mixtral").save_pretrained(tmp_path)
    weights = [
        build(run_config(tmp_path, {"router": "all"}, train={"seed": seed}), "cpu").model.lm_head.weight
        for seed in (1, 1, 2)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_tensor_without_a_rule_is_refused() -> None:
    model = meta_model(toy_config("mixtral"))
    model.model.layers[0].mlp.gate.extra = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UserError, match="MixtralTopKRouter has no rule to draw extra"):
        realize(model, "model.layers.0.mlp.gate", torch.device("cpu"))


def test_what_has_values_is_left_alone() -> None:
    model = toy_model("mixtral")
    before = model.lm_head.weight.clone()
    realize(model, "lm_head", torch.device("cpu"))
    assert torch.equal(model.lm_head.weight, before)


def test_the_rule_of_a_block_does_not_draw_its_other_parts_again() -> None:
    """The router of Qwen3-Next is drawn by the block around it, Nemotron-H's block would draw its out_proj again."""
    for model_type, first, then in (
        ("qwen3_next", "model.layers.0.mlp.shared_expert.up_proj", "model.layers.0.mlp.gate"),
        ("nemotron_h", "model.layers.0.mixer.out_proj", "model.layers.0.mixer"),
    ):
        model = meta_model(toy_config(model_type))
        realize(model, first, torch.device("cpu"))
        before = model.get_submodule(first).weight.clone()
        realize(model, then, torch.device("cpu"))
        assert torch.equal(model.get_submodule(first).weight, before)
        assert not any(p.is_meta for p in model.get_submodule(then).parameters(recurse=False))
