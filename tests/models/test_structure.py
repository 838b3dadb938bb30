"""The structure of single models whose numbers are known."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from moetune.errors import UserError
from moetune.models.components import COMPONENTS
from moetune.models.moe import ExpertShape
from moetune.models.structure import ModelStructure, meta_model, read_structure
from tests.toys import EXPERTS, HIDDEN, LAYERS, TOP_K, toy_config, toy_model


def structure_of(model_type: str, **overrides: object) -> ModelStructure:
    return read_structure(meta_model(toy_config(model_type, **overrides)))


def components_of(structure: ModelStructure) -> dict[str, str]:
    return {part.name: part.component for part in structure.parameters}


def test_paths_and_places_of_mixtral() -> None:
    structure = structure_of("mixtral")
    first = structure.moe_layers[0]
    block = "model.layers.0.mlp"
    assert (first.index, first.block, first.experts) == (0, block, f"{block}.experts")
    assert (first.router, first.top_k) == (f"{block}.gate", TOP_K)
    assert first.shape == ExpertShape(EXPERTS, HIDDEN, 48, True, False, False, True)
    assert (structure.num_layers, len(structure.moe_layers)) == (LAYERS, LAYERS)
    places = {part.name: (part.component, part.layer) for part in structure.parameters}
    assert places["model.embed_tokens.weight"] == ("embedding", None)
    assert places["model.layers.2.self_attn.k_proj.weight"] == ("attention", 2)
    assert places["model.layers.3.mlp.gate.weight"] == ("router", 3)
    assert places["model.layers.3.mlp.experts.down_proj"] == ("experts", 3)
    assert places["model.layers.1.input_layernorm.weight"] == ("norm", 1)
    assert places["model.norm.weight"] == ("norm", None)
    assert places["lm_head.weight"] == ("lm_head", None)


def test_linears_give_size_and_place_and_leave_the_router_out_where_it_is_no_linear() -> None:
    structure = structure_of("mixtral")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    expected = {f"model.layers.{layer}.self_attn.{name}" for layer in range(LAYERS) for name in names}
    assert set(structure.linears()) == expected | {"lm_head"}
    assert set(structure.linears("attention")) == expected
    assert structure.linears("attention")["model.layers.2.self_attn.k_proj"] == (HIDDEN, 16, "attention", 2, True)
    assert structure.linears("experts") == {}
    routers = {f"model.layers.{layer}.mlp.gate": (HIDDEN, EXPERTS, "router", layer, True) for layer in range(LAYERS)}
    assert structure.lora_layers() == structure.linears() | routers
    assert "model.layers.1.mlp.gate" not in structure.without([1]).lora_layers()
    gemma = structure_of("gemma4_text")  # whose routers hold a linear layer
    assert gemma.lora_layers() == gemma.linears()


def test_the_structure_is_the_same_on_meta_and_on_a_real_model() -> None:
    assert read_structure(toy_model("qwen2_moe")) == structure_of("qwen2_moe")


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("gpt_oss", {"is_transposed": True, "is_concatenated": False, "has_bias": True, "has_gate": True}),
        ("aria_text", {"is_transposed": True, "is_concatenated": True, "has_bias": False, "has_gate": True}),
        ("nemotron_h", {"is_transposed": False, "is_concatenated": True, "has_bias": False, "has_gate": False}),
        ("mixtral", {"is_transposed": False, "is_concatenated": True, "has_bias": False, "has_gate": True}),
    ],
)
def test_layout_flags(model_type: str, expected: dict[str, bool]) -> None:
    shape = dataclasses.asdict(structure_of(model_type).moe_layers[0].shape)
    assert {name: shape[name] for name in expected} == expected


def test_parameters_per_expert_without_gate_and_with_bias() -> None:
    gated = ExpertShape(8, 32, 48, True, False, False, True)
    assert gated.parameters_per_expert == 3 * 32 * 48
    assert dataclasses.replace(gated, has_gate=False).parameters_per_expert == 2 * 32 * 48
    assert dataclasses.replace(gated, has_bias=True).parameters_per_expert == 3 * 32 * 48 + 2 * 48 + 32


def test_shared_experts_and_their_gate_are_shared_experts() -> None:
    parts = components_of(structure_of("qwen2_moe"))
    assert parts["model.layers.0.mlp.shared_expert.up_proj.weight"] == "shared_experts"
    assert parts["model.layers.0.mlp.shared_expert_gate.weight"] == "shared_experts"
    assert parts["model.layers.0.mlp.gate.weight"] == "router"


def test_first_dense_layer_of_deepseek_is_dense_mlp_and_not_a_moe_layer() -> None:
    structure = structure_of("deepseek_v3")
    assert [layer.index for layer in structure.moe_layers] == [1, 2, 3]
    parts = components_of(structure)
    assert parts["model.layers.0.mlp.up_proj.weight"] == "dense_mlp"
    assert parts["model.layers.1.mlp.shared_experts.up_proj.weight"] == "shared_experts"


def test_shared_mlp_of_a_layer_without_experts_is_dense_mlp() -> None:
    shared = "model.layers.0.shared_mlp.input_linear.weight"
    assert components_of(structure_of("granitemoehybrid"))[shared] == "shared_experts"
    assert components_of(structure_of("granitemoehybrid", num_local_experts=0))[shared] == "dense_mlp"


def test_mixer_slot_of_nemotron_goes_by_what_sits_in_it() -> None:
    structure = structure_of("nemotron_h")
    assert [layer.index for layer in structure.moe_layers] == [1, 4]
    assert [
        part.component for part in structure.parameters if part.layer == 0 and part.name.endswith("in_proj.weight")
    ] == ["attention"]
    assert {part.component for part in structure.parameters if part.layer == 3} == {"dense_mlp", "norm"}


def test_tied_weights_count_once_under_the_first_name() -> None:
    structure = structure_of("mixtral", tie_word_embeddings=True)
    assert dict(structure.tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert structure.parameters_of("lm_head") == ()
    untied = structure_of("mixtral", tie_word_embeddings=False)
    head = sum(part.numel for part in untied.parameters_of("lm_head"))
    assert sum(part.numel for part in untied.parameters) == sum(part.numel for part in structure.parameters) + head


def test_vision_tower_is_dropped_and_counted_apart() -> None:
    structure = structure_of("gemma3")
    assert not any("vision_tower" in part.name for part in structure.parameters)
    whole = sum(parameter.numel() for parameter in toy_model("gemma3").parameters())
    assert sum(part.numel for part in structure.parameters) + sum(structure.dropped.values()) == whole
    assert structure.dropped.keys() == {"model.vision_tower", "model.multi_modal_projector"}


def test_dense_model_has_no_moe_layers() -> None:
    structure = structure_of("llama")
    assert structure.moe_layers == ()
    found = set(components_of(structure).values())
    assert found == {"embedding", "attention", "dense_mlp", "norm", "lm_head"} <= set(COMPONENTS)


def test_missing_top_k_is_refused() -> None:
    with pytest.raises(UserError, match="how many experts a token uses"):
        structure_of("deepseek_v2", num_experts_per_tok=None)


def test_top_k_that_transformers_does_not_read_is_refused() -> None:
    with pytest.raises(UserError, match="set num_experts_per_tok 4 to 2"):
        structure_of("phimoe", num_experts_per_tok=4)


def test_experts_without_the_mark_are_refused_by_parameter_shape_alone() -> None:
    """A stack of matrices with one slice an expert, under a name that says nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(toy_config("llama"))
        model.config.num_experts = 8
        model.model.layers[0].mlp.weights = nn.Parameter(torch.empty(8, 16, 32))
    with pytest.raises(UserError, match=r"'llama' is not supported.*model\.layers\.0\.mlp\.weights"):
        read_structure(model)


def test_unbuildable_configuration_is_a_user_error() -> None:
    config = MixtralConfig(hidden_size=32, num_hidden_layers=1, hidden_act="no_such_activation")
    with pytest.raises(UserError, match=r"cannot build 'mixtral'.*no_such_activation"):
        meta_model(config)


def test_settings_that_the_type_lacks_and_that_change_what_it_computes_are_refused() -> None:
    assert structure_of("qwen3_moe", q_lora_rank=None).moe_layers
    assert structure_of("bailing_hybrid", expert_swiglu_limit_list=[0] * 4).moe_layers
    assert structure_of("deepseek_v3", q_lora_rank=16).moe_layers
    with pytest.raises(UserError, match=r"expert_swiglu_limit_list \[0, 0, 0, 4\], and transformers does not limit"):
        structure_of("bailing_hybrid", expert_swiglu_limit_list=[0, 0, 0, 4])
    with pytest.raises(UserError, match=r"'qwen3_moe': .* q_lora_rank 24, and transformers builds"):
        structure_of("qwen3_moe", q_lora_rank=24)
