#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: what target_modules="all-linear" adapts of a mixture of experts goes by its type. Of
# mixtral and qwen3_moe: attention, router and experts. Of gpt_oss and granitemoe: attention alone. Of deepseek_v3:
# experts, but neither the first layers' dense MLP nor shared experts, the only ones that are nn.Linear; naming gate_proj,
# up_proj, down_proj leaves them out as well. No warning. Hurts whoever compares models under one configuration.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 2,
}
TYPES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "granitemoe": {"num_local_experts": 4},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
                    "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
MLP = ["gate_proj", "up_proj", "down_proj"]
PARTS = ("self_attn", "mlp.gate", "mlp.router", "mlp.experts", "block_sparse_moe", "shared_experts", "layers.0.mlp.gate_proj")
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: of every type the same parts, or a warning")
adapted = {}
for kind, sizes in TYPES.items():
    for targets in ("all-linear", MLP) if kind == "deepseek_v3" else ("all-linear",):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes))
        linear = sum(isinstance(module, torch.nn.Linear) for module in base.modules()) - 1  # LM head
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            model = get_peft_model(base, LoraConfig(r=8, target_modules=targets))
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        modules = {name.partition(".lora_")[0] for name in names}
        parts = [part for part in PARTS if any(f".{part}." in f"{name}." for name in modules)]
        said = [str(one.message) for one in raised if "shared" in str(one.message) or "expert" in str(one.message)]
        adapted[kind, str(targets)] = parts
        print(f"{kind}, {targets}: {parts}; warnings about what is left out: {said}; {linear} nn.Linear")
all_parts = ["self_attn", "mlp.gate", "mlp.experts"]
wanted = [all_parts, all_parts, ["self_attn"], ["self_attn"], all_parts, ["mlp.experts"]]
sys.exit(0 if list(adapted.values()) == wanted else "changed since this was found")
EOF
