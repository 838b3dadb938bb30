"""Toy models of every type of causal language model in transformers: its defaults, with small sizes by field name.

`toy_config("qwen3_moe")` gives a configuration whose model has few layers, hidden size 32 and 8 experts, so that it can
be built and run on a CPU. A field is set only if the type has it.
"""

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moetune.models.text import auto_class

VOCAB = 96
HIDDEN = 32
LAYERS = 4
EXPERTS = 8
TOP_K = 2

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "ngram_vocab_size_base", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "ple_embed_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("swa_num_attention_heads", "sliding_num_attention_heads", "linear_num_attention_heads"), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "sliding_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "global_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "ffn_hidden_size", "dff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), TOP_K),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank", "router_hidden_size"), 16),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions", "index_topk"), 128),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_dt_rank"), 8),
    **dict.fromkeys(("adapter_in_dim", "adapter_input_size", "adapter_out_dim"), HIDDEN),
    "sliding_window": 16,
    "hidden_size_per_layer_input": 8,
}
"""Field of a configuration -> its value in a toy."""

_HYBRID = ["linear_attention", "linear_attention", "hybrid", "hybrid"]
_OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": VOCAB},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
    },
    "deepseek_v4": {
        "o_groups": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 24,
        "use_dsa": False,
        "use_sliding_window": False,
    },
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * LAYERS},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 8],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"enable_moe_block": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision", "hidden_size": HIDDEN, "num_hidden_layers": 1}},
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "index_kpool": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layers_block_type": ["linear_attention", "full_attention"] * 2},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "kimi_linear": {"linear_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "no_rope_layer_interval": 2,
    },
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "mistral4": {"head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "n_groups": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
    },
    "qwen3_vl_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [8, 24]},
    "step3p5": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "share_expert_dim": 24,
        "num_sliding_attention_heads": 8,
        "swiglu_limits": [None, 0.05, 0.0, None],
    },
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlm": {"emb_dim": HIDDEN},
    "zamba": {"layers_block_type": _HYBRID},
    "zamba2": {"layers_block_type": _HYBRID},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> further fields, for types whose code only works with certain relations between sizes."""


def causal_lm_types() -> list[str]:
    """Return every model type that `AutoModelForCausalLM` can build."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@functools.cache
def marked_types() -> tuple[str, ...]:
    """Return every model type, of any task, whose code marks a class by `@use_experts_implementation`."""
    return tuple(sorted(name for name in CONFIG_MAPPING if "@use_experts_implementation" in _modeling_source(name)))


def expert_model_types() -> list[str]:
    """Return the causal language models among `marked_types`."""
    return [name for name in causal_lm_types() if name in marked_types()]


def toy_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """Return a small configuration of a type; `overrides` are further fields, which win."""
    return _shrunk(CONFIG_MAPPING[model_type], overrides)


def toy_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return the toy model, with towers for images or audio if it has any: float32, CPU, random weights, eval mode."""
    torch.manual_seed(seed)
    config = toy_config(model_type, **overrides)
    return auto_class(config).from_config(config, dtype=torch.float32).eval()


def _shrunk(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    """Return a configuration of this class and its sub-configurations, with toy sizes."""
    default = config_class()
    fields = default.to_dict()
    sizes = {name: value for name, value in _SIZES.items() if name in fields}
    sizes |= {name: min(value, 2) for name, value in fields.items() if name.endswith("_token_id") and _is_id(value)}
    if "kv_lora_rank" in fields:  # latent attention gives every head its own keys
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= _OVERRIDES.get(config_class.model_type, {})
    parts = {
        name: _shrunk(type(part), {}).to_dict()
        for name in config_class.sub_configs
        if isinstance(part := getattr(default, name, None), PretrainedConfig)
    }
    config = config_class(**(parts | sizes | overrides))
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(config, name, None), list) and len(kinds) > config.num_hidden_layers:
            setattr(config, name, kinds[: config.num_hidden_layers])
    return config


def _is_id(value: object) -> bool:
    """Return whether a field's value is a token id that a small vocabulary may lack."""
    return isinstance(value, int) and value > 2


@functools.cache
def _modeling_source(model_type: str) -> str:
    """Return the source of transformers' `modeling_….py` of a model type; empty if there is none."""
    module = model_type_to_module_name(model_type)
    file = Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""
