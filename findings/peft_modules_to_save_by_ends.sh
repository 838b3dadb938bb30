#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: modules_to_save takes every module whose path ends with the letters given, not
# the one of that name. "gate", Qwen2-MoE's router, trains shared_expert_gate as well; "experts" trains DeepSeek-V3's
# shared_experts; "norm", the last one, trains every norm of each layer. They are saved, and put in place by whoever
# opens the adapter. No warning. In target_modules a name is a whole name. Hurts whoever trains routers or experts
# alone, or counts what trains.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 2,
}
TYPES = {
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
                    "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
CASES = [("qwen2_moe", "gate"), ("qwen3_moe", "gate"), ("deepseek_v3", "experts"), ("qwen3_moe", "norm")]
wanted = [{"gate", "shared_expert_gate"}, {"gate"}, {"experts", "shared_experts"},
          {"norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}]


def build(kind):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | TYPES[kind]))


print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: modules_to_save takes modules of the name given, as target_modules does")
seen, said, saved = [], [], []
for kind, name in CASES:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        model = get_peft_model(build(kind), LoraConfig(r=4, target_modules=["o_proj"], modules_to_save=[name]))
        model.save_pretrained(f"{sys.argv[1]}/{kind}-{name}")
    wrapped = [path.removesuffix(".modules_to_save") for path, _ in model.named_modules() if
               path.endswith(".modules_to_save")]
    seen.append({path.rpartition(".")[2] for path in wrapped})
    stored = {entry for entry in load_file(f"{sys.argv[1]}/{kind}-{name}/adapter_model.safetensors")
              if ".lora_" not in entry}
    saved.append(all(any(entry.startswith(f"{path}.") for entry in stored) for path in wrapped))
    said += [str(one.message) for one in raised if "modules_to_save" in str(one.message)]
    print(f"{kind}, modules_to_save {name!r}: {sorted(seen[-1])} in {len(wrapped)} places, all in the file: {saved[-1]}")
whole = get_peft_model(build("qwen2_moe"), LoraConfig(r=4, target_modules=["o_proj", "expert_gate"]))
targets = {path.rpartition(".")[2] for path in whole.targeted_module_names}
print(f"qwen2_moe, target_modules 'o_proj' and 'expert_gate': {sorted(targets)}")
print("warnings about it:", said)
right = targets == {"o_proj"}
sys.exit(0 if seen == wanted and all(saved) and right and not said else "changed since this was found")
EOF
