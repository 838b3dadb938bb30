#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0: from_pretrained(gguf_file=...) counts gpt-oss among architectures it supports, and
# reads none of its experts, their biases and the attention's sinks, because it looks for them under names that no GGUF
# file has: nine tenths of gpt-oss-20b are new random numbers. A report lists missing keys, as for a new head; no error.
# Right for Qwen3-MoE. Hurts whoever takes a GGUF file of gpt-oss as base of fine-tuning, or converts it back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
from importlib.metadata import version

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
CONFIGS = {  # the architecture's name in GGUF; sizes that transformers does not read from it are its defaults
    "qwen3moe": Qwen3MoeConfig(**SIZES, num_experts=4, head_dim=16, intermediate_size=64),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=64, intermediate_size=64),
}
NAMES = {  # transformers' names -> GGUF's
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}


def as_gguf(kind, name, weight):
    """Yield the tensors of GGUF, with their names, that hold a weight of transformers."""
    name = name.replace("model.layers.0.", "blk.0.")
    block, short = ("blk.0.", name.removeprefix("blk.0.")) if name.startswith("blk.") else ("", name)
    if "experts" in short and kind == "gpt-oss" and not short.endswith("bias"):
        weight = weight.swapaxes(1, 2)  # transformers has [experts, in, out] there
    if "gate_up_proj" in short:
        parts = (weight[:, ::2], weight[:, 1::2]) if kind == "gpt-oss" else np.split(weight, 2, 1)
        suffix = "bias" if short.endswith("bias") else "weight"
        for half, part in zip(("gate", "up"), parts, strict=True):
            yield f"{block}ffn_{half}_exps.{suffix}", part
    elif short in NAMES:
        yield block + NAMES[short], weight
    else:
        module, suffix = short.rsplit(".", 1)
        norm = "post_attention_norm" if kind == "gpt-oss" else "ffn_norm"
        yield f"{block}{(NAMES | {'post_attention_layernorm': norm})[module]}.{suffix}", weight


print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "gguf")))
print("expected: the weights that the file has")
seen = {}
for kind, config in CONFIGS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    weights = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for part, tensor in as_gguf(kind, name, weight.normal_().numpy()):
                weights[part] = np.ascontiguousarray(tensor)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == kind)
    known = {gguf.TENSOR_NAMES[tensor].format(bid=0) for tensor in gguf.MODEL_TENSORS[arch]}
    assert {name.rsplit(".", 1)[0] for name in weights} == known, "names are not those of GGUF"
    writer = gguf.GGUFWriter(path := f"{sys.argv[1]}/{kind}.gguf", kind)
    writer.add_name(kind)
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(96)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=f"{kind}.gguf")
    wrong = [
        name.removeprefix("model.layers.0.") for name, weight in model.named_parameters()
        if not torch.equal(weight, opened.get_parameter(name))
    ]
    share = sum(model.get_parameter(f"model.layers.0.{name}").numel() for name in wrong) / model.num_parameters()
    seen[kind] = wrong
    supported = opened.config.model_type in GGUF_SUPPORTED_ARCHITECTURES
    print(f"{kind} (supported: {supported}): {share:.0%} of the parameters differ: {wrong or 'none'}")
wanted = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
as_found = not seen["qwen3moe"] and seen["gpt-oss"] == ["self_attn.sinks", *(f"mlp.experts.{name}" for name in wanted)]
sys.exit(0 if as_found else "changed since this was found")
EOF
