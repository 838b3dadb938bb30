"""What is changed of transformers, and used of it without being public, is still necessary and possible."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MixtralForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen

from moetune.adapt.attention import takes_cu_seqlens
from moetune.compat.transformers import (
    chat_template_environment,
    draw,
    dtypes_kept,
    fix_rotary_length,
    has_sinks,
    mark_initialized,
    reads_weight,
    supports_attention,
    unmatched_keys,
    without_packages,
)
from moetune.memory.trace import trace
from moetune.models.structure import meta_model
from moetune.run.resolve import resolve
from tests.reference import run_config, token_ids
from tests.toys import toy_config, toy_model


def test_rules_draw_what_is_not_marked() -> None:
    model = toy_model("mixtral")
    drawn, kept = (model.get_submodule(f"model.layers.{layer}.self_attn.q_proj") for layer in (0, 1))
    for linear in (drawn, kept):
        linear.weight.data.fill_(7.0)
    mark_initialized(kept.weight)
    for linear in (drawn, kept):
        draw(model, linear)
    assert not (drawn.weight == 7.0).any()
    assert (kept.weight == 7.0).all()


def test_a_rotary_embedding_that_asks_for_the_length_does_not() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=parameters, max_position_embeddings=4)
    rotary, x, positions = LlamaRotaryEmbedding(config), torch.ones(1, 8, 16), torch.arange(8)[None]
    fix_rotary_length(rotary)
    before = rotary.inv_freq
    rotary(x, positions)  # beyond the length that it was made for
    assert rotary.inv_freq is before
    assert config.rope_parameters["rope_type"] == "dynamic"


def test_models_with_sinks_need_attention_that_knows_of_them() -> None:
    assert has_sinks(toy_model("gpt_oss"))
    assert not has_sinks(toy_model("mixtral"))
    assert not has_sinks(toy_model("inkling2_text"))  # its sinks depend on the token
    for attention in ("sdpa", "flash_attention_2"):
        assert supports_attention(type(toy_model("mixtral")), attention)
        assert not supports_attention(type(toy_model("gpt_oss")), attention)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_linear", "laguna", "minimax_m2"])
def test_correction_biases_stay_in_float32(model_type: str) -> None:
    """Of DeepSeek-V3 by transformers, of the others by us; transformers 5.24 keeps some routers' weights too."""
    model = toy_model(model_type)
    kept = dtypes_kept(model, torch.bfloat16)
    assert "e_score_correction_bias" in {name.rpartition(".")[2] for name in kept}
    assert set(kept.values()) == {torch.float32}
    assert not dtypes_kept(model, torch.float32)


def test_keys_that_may_be_missing_or_surplus() -> None:
    """Tied to others, and rotary frequencies, which older checkpoints hold; all else is named."""
    missing, unexpected = ["lm_head.weight", "model.norm.weight"], ["model.layers.0.rotary_emb.inv_freq", "extra"]
    model = MixtralForCausalLM(toy_config("mixtral", tie_word_embeddings=True))
    assert unmatched_keys(model, missing, unexpected) == ({"model.norm.weight"}, {"extra"})


@pytest.mark.parametrize(
    ("model_type", "path", "weight", "dtype"),
    [
        ("jamba", "model.layers.0.mamba.dt_proj", True, True),
        ("jamba", "model.layers.0.mamba.in_proj", False, False),
        ("nemotron_h", "model.layers.0.mixer.out_proj", True, True),
        ("deepseek_v32", "model.layers.0.self_attn.indexer.weights_proj", False, True),
        ("mixtral", "model.layers.0.self_attn.q_proj", False, False),
    ],
)
def test_a_weight_that_is_read_without_a_call(model_type: str, path: str, weight: bool, dtype: bool) -> None:
    owner, _, name = path.rpartition(".")
    module = meta_model(toy_config(model_type)).get_submodule(owner)
    assert hasattr(module, name)
    assert reads_weight(module, name) == weight
    assert reads_weight(module, name, or_its_dtype=True) == dtype


@pytest.mark.full
def test_kernels_of_other_packages_are_left_out_of_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for causal-conv1d with its signature, which, as its kernel, takes tensors on a GPU alone."""

    def causal_conv1d_fn(
        x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
        return_final_states: bool = False, final_states_out: Any = None, activation: Any = None,
    ) -> Any:  # fmt: skip
        raise RuntimeError("Expected x.is_cuda() to be true, but got false.")

    config = toy_config("qwen3_5_moe_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    config.save_pretrained(tmp_path)
    run = resolve(run_config(tmp_path, {"router": "all"}, model={"base": "nf4", "attention": "auto"}), "cuda")
    before = trace(run).parts()

    package = ModuleType("stand_in")
    vars(package)["causal_conv1d_fn"] = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "stand_in", package)
    installed = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "stand_in")(
        qwen.causal_conv1d_fn.__wrapped__
    )
    monkeypatch.setattr(qwen, "causal_conv1d_fn", installed)
    model = toy_model("qwen3_5_moe_text")
    with pytest.raises(RuntimeError, match="is_cuda"):
        model(input_ids=token_ids())
    with without_packages(model):
        model(input_ids=token_ids())
    assert qwen.causal_conv1d_fn is installed
    assert trace(run).parts() == before
    assert takes_cu_seqlens(toy_model("qwen3_5_moe_text").to("meta"), None)


def test_the_environment_of_chat_templates() -> None:
    environment = chat_template_environment()
    assert {"strftime_now", "raise_exception", "namespace"} <= environment.globals.keys()
    environment.parse("{% generation %}{% for a in b %}{% break %}{% endfor %}{% endgeneration %}")
