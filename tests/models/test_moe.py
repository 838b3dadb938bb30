"""Reading routers, top_k and fields off models that no type in transformers has, but a future one may."""

import itertools

import pytest
import torch
from torch import Tensor, nn
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


class Experts(nn.Module):
    """As transformers' experts of that layout, without its mark."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * 24, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 24))

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up.clamp(max=0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for token, choice in itertools.product(*map(range, top_k_index.shape)):
            expert, x = top_k_index[token, choice], self.read(hidden_states[token], top_k_weights[token, choice])
            x = self._apply_gate(self.gate_up_proj[expert] @ x)
            out[token] += self.down_proj[expert] @ x * self.write(top_k_weights[token, choice])
        return out

    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        return x

    def write(self, weight: Tensor) -> Tensor:
        return weight


class OnInputs(Experts):
    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    def write(self, weight: Tensor) -> Tensor:
        return torch.ones_like(weight)


class Alternating(Experts):
    def _apply_gate(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x[..., ::2]) * x[..., 1::2]


class UpFirst(Experts):
    def _apply_gate(self, x: Tensor) -> Tensor:
        return super()._apply_gate(x.roll(24, -1))


class WithIdentities(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS + 2, 2 * 24, HIDDEN))


def test_llama_4_is_read_with_one_expert_per_token_alone() -> None:
    """With several, each expert's input is multiplied by its own score, and no published model has them."""
    layer = read_structure(meta_model(toy_config("llama4_text"))).moe_layers[0]
    assert (layer.top_k, layer.shape) == (1, moe.ExpertShape(EXPERTS, HIDDEN, 48, True, False, True, True))
    with pytest.raises(UserError, match="'llama4_text' is not supported: its experts"):
        read_structure(meta_model(toy_config("llama4_text", num_experts_per_tok=2)))


@pytest.mark.parametrize("kind", [Experts, OnInputs, Alternating, UpFirst, WithIdentities])
def test_experts_without_the_mark_are_marked_if_they_compute_the_same(kind: type[Experts]) -> None:
    with torch.device("meta"):
        model = nn.ModuleList([kind(), kind()])
    moe.mark_experts(model)
    assert {moe.is_experts(module) for module in model} == {kind is Experts}
    assert all(parameter.is_meta for parameter in model.parameters())
    if kind is Experts:
        assert moe.read_shape(model[1], "x") == moe.ExpertShape(EXPERTS, HIDDEN, 24, True, False, False, True)
