"""Counts that are published, and the invariants of the parameters."""

import json

import pytest

from moetune.models.components import COMPONENTS
from moetune.models.parameter_count import ParameterCount, count_parameters
from moetune.models.source import find_model_source
from moetune.models.structure import meta_model, read_structure
from tests.toys import EXPERTS, LAYERS, TOP_K, toy_config


def count_of(model_type: str, **overrides: object) -> ParameterCount:
    return count_parameters(read_structure(meta_model(toy_config(model_type, **overrides))))


def test_mixtral_8x7b() -> None:
    parameters = count_parameters(read_structure(meta_model(find_model_source("mixtral-8x7b").config)))
    assert parameters.total == 46_702_792_704
    assert parameters.components["experts"] == 45_097_156_608
    assert parameters.components["router"] == 1_048_576
    assert parameters.per_expert == 176_160_768
    assert parameters.active_per_token == 12_879_925_248
    assert (parameters.num_moe_layers, parameters.num_experts, parameters.top_k) == (32, 8, 2)


def test_json_has_the_keys_that_other_programs_read() -> None:
    result = json.loads(json.dumps(count_of("qwen2_moe").to_json()))
    assert result["schema"] == 1
    assert tuple(result["components"]) == COMPONENTS
    assert sum(result["components"].values()) == result["total"]
    keys = {"total", "active_per_token", "per_expert", "num_moe_layers", "num_experts", "top_k", "components"}
    assert keys <= set(result)
    assert len(result["layers"]) == LAYERS
    outside = sum(result["components"][name] for name in ("embedding", "lm_head"))
    final_norm = 32
    assert sum(layer["total"] for layer in result["layers"]) == result["total"] - outside - final_norm


def test_active_leaves_out_the_experts_a_token_does_not_use() -> None:
    parameters = count_of("mixtral")
    assert isinstance(parameters.per_expert, int)
    assert parameters.total - parameters.active_per_token == LAYERS * (EXPERTS - TOP_K) * parameters.per_expert
    assert parameters.active["experts"] == LAYERS * TOP_K * parameters.per_expert
    assert count_of("mixtral", num_experts_per_tok=EXPERTS).active_per_token == parameters.total


def test_dense_model() -> None:
    parameters = count_of("llama")
    assert parameters.active_per_token == parameters.total
    assert (parameters.per_expert, parameters.num_experts, parameters.top_k) == (None, None, None)
    assert parameters.num_moe_layers == 0
    assert all(layer.num_experts is None and layer.active == layer.total for layer in parameters.layers)


def test_what_differs_by_layer_is_a_list() -> None:
    parameters = count_of("hunyuan_v1_moe", moe_topk=[1, 2, 2, 2])
    assert parameters.top_k == [1, 2, 2, 2]
    assert parameters.num_experts == EXPERTS
    assert isinstance(parameters.per_expert, int)
    assert parameters.total - parameters.active_per_token == (7 + 6 + 6 + 6) * parameters.per_expert


@pytest.mark.parametrize("name", ["llama-7b", "llama-3-8b"])
def test_embedding_and_head_of_dense_catalog_models_are_equal_in_size(name: str) -> None:
    parameters = count_parameters(read_structure(meta_model(find_model_source(name).config)))
    assert parameters.components["embedding"] == parameters.components["lm_head"]
