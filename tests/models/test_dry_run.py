"""Settings of a config.json that do not fit are found before anything is built, and named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moetune.errors import UserError
from moetune.models.catalog import model_names
from moetune.models.dry_run import dry_run, shortened
from moetune.models.source import find_model_source
from moetune.models.stack import leave_out
from moetune.models.structure import meta_model, read_structure
from tests.toys import expert_model_types, toy_config

FAR = 10**30
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"n_routed_experts": 6, "n_group": 4}, "n_group 4, .* 6 experts"),
    ("deepseek_v3", {"n_group": 2, "topk_group": 3}, "topk_group 3"),
    ("deepseek_v3", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok 3"),
    ("deepseek_v3", {"n_group": 8, "topk_group": 2}, "n_routed_experts 8, .*n_group 8"),  # two of a group are compared
    ("deepseek_v3", {"n_group": 0}, "n_group 0"),
    ("deepseek_v3", {"n_group": None}, "n_group None"),
    ("deepseek_v3", {"topk_group": FAR}, f"topk_group {FAR}"),
    ("deepseek_v3", {"v_head_dim": 10**9}, r"kv_b_proj.weight would be \[40000000"),
    ("deepseek_v3", {"v_head_dim": FAR}, "Overflow"),
    ("deepseek_v3", {"v_head_dim": 0}, r"o_proj.weight would be \[32, 0\]"),
    ("deepseek_v3", {"v_head_dim": -3}, "negative dimension"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "self_attn with .*qk_rope_head_dim 7"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: softmax, and transformers computes sigmoid"),
    ("mixtral", {"scoring_func": "sigmoid"}, "computes softmax"),
    ("deepseek_v32", {"index_head_dim": 3}, "index_head_dim 3"),
    ("mixtral", {"num_key_value_heads": 3}, "num_attention_heads 4, num_key_value_heads 3"),
    ("mixtral", {"sliding_window": 0}, "sliding_window 0"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window"),
    ("minimax_m2", {"rotary_dim": 99}, "self_attn with head_dim 8"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3, linear_num_key_heads 4"),
    ("nemotron_h", {"n_groups": 3}, "mamba_num_heads 4, .*n_groups 3"),
    ("jamba", {"mamba_dt_rank": 0}, "would be"),
    ("glm_moe_dsa", {"indexer_types": ["full"] * 6}, "indexer_types .* 6 entries, for 4 layers"),
    ("granitemoe_swa", {"layer_rope_theta": [1e4] * 3}, "layer_rope_theta has 3 entries"),
    ("granitemoe_swa", {"layer_rope_theta": [1e4] * 5}, "layer_rope_theta .* 5 entries"),
    ("gemma4_text", {"num_attention_heads": 1}, "head_dim 8, num_attention_heads 1, num_key_value_heads 2"),  # by layer
]


@pytest.mark.parametrize(("model_type", "settings", "message"), BAD)
def test_settings_that_do_not_fit_are_named(model_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"{model_type}.*{message}"):
        examine(model_type, settings)


def examine(model_type: str, settings: dict[str, Any]) -> None:
    model = meta_model(toy_config(model_type, **settings))
    read_structure(model)
    dry_run(model)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("model_type", expert_model_types())
def test_models_whose_settings_fit_pass(model_type: str) -> None:
    dry_run(meta_model(toy_config(model_type)))


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", model_names())
def test_published_models_pass(name: str) -> None:
    dry_run(meta_model(find_model_source(name).config))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_is_named_with_those_that_are_known(key: str, tmp_path: Path, moetune: Any) -> None:
    config = toy_config("mixtral").to_dict()
    del config["rope_parameters"]
    kind = {"type": "foo"} if key == "rope_scaling" else {"rope_type": "foo", "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config | {key: kind}))
    result = moetune("count", tmp_path)
    assert result.code == 2
    assert re.search(r"rope_type 'foo' .* none of default, linear, dynamic, yarn, longrope, llama3", result.err)


@pytest.mark.parametrize("theta", [0, -1e4, "1e4", None])
def test_a_theta_that_is_no_number_above_0_is_named(theta: Any) -> None:
    config = toy_config("mixtral", rope_parameters={"rope_type": "default", "rope_theta": theta})
    with pytest.raises(UserError, match=f"rope_theta {theta!r} is no number above 0"):
        meta_model(config)


def test_commands_refuse_before_they_build(tmp_path: Path, moetune: Any) -> None:
    toy_config("deepseek_v3", qk_rope_head_dim=7).save_pretrained(tmp_path)
    for command in (["count", tmp_path], ["predict", tmp_path, "--lora", "4"]):
        result = moetune(*command)
        assert (result.code, "qk_rope_head_dim 7" in result.err) == (2, True)


def test_a_model_that_lacks_layers_is_not_changed() -> None:
    """As one that is traced with a few of its layers, whose numbers are not their places among those that run."""
    plain = meta_model(toy_config("mixtral"))
    leave_out(plain, {2})
    before = [*plain.state_dict()]
    shorter = shortened(plain)
    assert [*plain.state_dict()] == before
    assert {name.split(".")[2] for name in shorter.state_dict() if ".layers." in name} == {"0"}
