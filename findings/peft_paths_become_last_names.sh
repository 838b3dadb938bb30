#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: of types whose weights transformers 5 fused (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3,
# GLM-4.5, …) PEFT keeps the last part of what `target_modules` names. A regular expression for one layer's attention
# adapts that of every layer; `shared_experts.down_proj`, or the path of a dense layer, adapts the routed experts of all
# layers and nothing of what is named. No warning. Llama and gpt-oss are adapted as named. Hurts whoever trains a few
# layers, or shared experts alone: most of the adapter is where it was not asked for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF' 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
import re
import sys
from importlib.metadata import version

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 32, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
LAYER = r"model\.layers\.2\.self_attn\.(q|o)_proj"


def adapted(config, sizes, names):
    model = AutoModelForCausalLM.from_config(config(**SIZES | sizes))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=names))
    found = {name.partition(".lora_A")[0].removeprefix("base_model.model.") for name, _ in model.named_parameters() if ".lora_A" in name}
    return sorted({re.sub(r"model\.layers\.(\d+)\.", r"layer \1: ", name.removesuffix(".base_layer")) for name in found})


print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")))
print("expected: layer 2 alone")
seen = []
for config, sizes in ((LlamaConfig, {}), (GptOssConfig, EXPERTS), (MixtralConfig, EXPERTS), (Qwen3MoeConfig, EXPERTS)):
    layers = {name.partition(":")[0] for name in adapted(config, sizes, LAYER)}
    print(f"{config.model_type}, {LAYER}: {', '.join(sorted(layers))}")
    seen.append(len(layers))
print("expected: what is named")
for name in ("shared_experts.down_proj", "model.layers.0.mlp.down_proj"):
    found = adapted(DeepseekV3Config, EXPERTS | LATENT, [name])
    print(f"deepseek_v3, {name}: {', '.join(found)}")
    seen.append(found == [f"layer {layer}: mlp.experts" for layer in (1, 2, 3)])
sys.exit(0 if seen == [1, 1, 4, 4, True, True] else "changed since this was found")
EOF
