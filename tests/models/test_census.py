"""Counts that are published, and the invariants of the census."""

from __future__ import annotations

import json

import pytest

from moetune.models.parameter_count import Census, take_census
from moetune.models.source import find_model_source
from moetune.models.structure import COMPONENTS, meta_model, read_anatomy
from tests.toys import EXPERTS, LAYERS, TOP_K, toy_config


def census_of(model_type: str, **overrides: object) -> Census:
    return take_census(read_anatomy(meta_model(toy_config(model_type, **overrides))))


def test_mixtral_8x7b() -> None:
    census = take_census(read_anatomy(meta_model(find_model_source("mixtral-8x7b").config)))
    assert census.total == 46_702_792_704
    assert census.components["experts"] == 45_097_156_608
    assert census.components["router"] == 1_048_576
    assert census.per_expert == 176_160_768
    assert census.active_per_token == 12_879_925_248
    assert (census.num_moe_layers, census.num_experts, census.top_k) == (32, 8, 2)


def test_json_has_the_keys_that_other_programs_read() -> None:
    result = json.loads(json.dumps(census_of("qwen2_moe").to_json()))
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
    census = census_of("mixtral")
    assert isinstance(census.per_expert, int)
    assert census.total - census.active_per_token == LAYERS * (EXPERTS - TOP_K) * census.per_expert
    assert census.active["experts"] == LAYERS * TOP_K * census.per_expert
    assert census_of("mixtral", num_experts_per_tok=EXPERTS).active_per_token == census.total


def test_dense_model() -> None:
    census = census_of("llama")
    assert census.active_per_token == census.total
    assert (census.per_expert, census.num_experts, census.top_k, census.num_moe_layers) == (
        None,
        None,
        None,
        0,
    )
    assert all(layer.num_experts is None and layer.active == layer.total for layer in census.layers)


def test_what_differs_by_layer_is_a_list() -> None:
    census = census_of("hunyuan_v1_moe", moe_topk=[1, 2, 2, 2])
    assert census.top_k == [1, 2, 2, 2]
    assert census.num_experts == EXPERTS
    assert isinstance(census.per_expert, int)
    assert census.total - census.active_per_token == (7 + 6 + 6 + 6) * census.per_expert


@pytest.mark.parametrize("name", ["llama-7b", "llama-3-8b"])
def test_embedding_and_head_of_dense_catalog_models_are_equal_in_size(name: str) -> None:
    census = take_census(read_anatomy(meta_model(find_model_source(name).config)))
    assert census.components["embedding"] == census.components["lm_head"]
