"""Reading routers, top_k and fields off models that no type in transformers has, but a future one may."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from moetune.errors import UserError
from moetune.models import moe
from moetune.models.structure import meta_model, read_structure
from tests.toys import EXPERTS, HIDDEN, toy_config


@pytest.fixture
def model() -> PreTrainedModel:
    return meta_model(toy_config("mixtral"))


def test_a_router_under_another_name_is_found_by_class_then_by_shape(model: PreTrainedModel) -> None:
    block = model.model.layers[0].mlp
    block.scorer = block.gate
    del block.gate
    assert moe.find_router(model, "model.layers.0.mlp", EXPERTS) == "model.layers.0.mlp.scorer"
    with torch.device("meta"):
        block.scorer = nn.Linear(HIDDEN, EXPERTS)
    assert moe.find_router(model, "model.layers.0.mlp", EXPERTS) == "model.layers.0.mlp.scorer"


def test_a_block_without_a_router_is_refused(model: PreTrainedModel) -> None:
    del model.model.layers[1].mlp.gate
    with pytest.raises(UserError, match=r"'mixtral'.*layers\.1\.mlp\.experts has no router"):
        read_structure(model)


def test_experts_that_hold_more_than_their_projections_are_refused(model: PreTrainedModel) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.scale = nn.Parameter(torch.empty(EXPERTS, HIDDEN, device="meta"))
    with pytest.raises(UserError, match=r"'mixtral'.*layers\.0\.mlp\.experts.*layout is not supported"):
        read_structure(model)


def test_experts_outside_the_decoder_layers_are_refused(model: PreTrainedModel) -> None:
    with torch.device("meta"):
        model.model.extra = type(model.model.layers[0].mlp)(model.config)
    with pytest.raises(UserError, match=r"'mixtral'.*model\.extra\.experts.*of a decoder layer"):
        read_structure(model)


def test_a_field_that_a_configuration_keeps_per_layer_reads_as_none() -> None:
    config = toy_config("llama", per_layer_config={1: {"intermediate_size": 64}})
    with pytest.raises(RuntimeError):
        _ = config.intermediate_size
    assert moe._field(config, "intermediate_size") is None


def test_config_of_a_vision_model_is_asked_for_its_text_part() -> None:
    config = toy_config("qwen3_5_moe")
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert {layer.top_k for layer in read_structure(built).moe_layers} == {2}
    assert EXPERTS in moe._expert_counts(config)
