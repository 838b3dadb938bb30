#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: of a rank_pattern for fused experts PEFT warns that its keys “did not match any
# targeted module and were ignored”, and applies it: the warning looks at modules alone, the ranks at parameters too.
# LoraConfig(target_modules="all-linear") of a Mixtral warns so of a pattern that PEFT itself added (gate_up gets twice the
# rank). Hurts whoever believes the warning and sets the rank in another way, or learns to overlook a true one.
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
from transformers import MixtralConfig, MixtralForCausalLM

transformers.logging.set_verbosity_error()
CONFIG = MixtralConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4,
)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: a warning that a pattern was ignored only if it was")
as_found = True
for options in (
    {"target_parameters": EXPERTS, "rank_pattern": {EXPERTS[0]: 32}},
    {"target_modules": "all-linear"},
):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        model = get_peft_model(MixtralForCausalLM(CONFIG), LoraConfig(r=8, lora_alpha=16, **options))
    said = [str(warning.message) for warning in raised if "rank_pattern" in str(warning.message)]
    # gate_up's factors are those of `experts.base_layer`, A is [experts x rank, input]
    ranks = {
        name.split("mlp.")[1].removesuffix(".lora_A.default.weight"): len(factor) // 4
        for name, factor in model.named_parameters()
        if "experts" in name and "lora_A" in name
    }
    print(f"{options}\n    warnings: {said}\n    ranks: {ranks}")
    wanted = 32 if "rank_pattern" in options else 16
    as_found = as_found and any("ignored" in text for text in said)
    as_found = as_found and ranks == {"experts.base_layer": wanted, "experts": 8}
sys.exit(0 if as_found else "changed since this was found")
EOF
