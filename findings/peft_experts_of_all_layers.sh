#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: layers_to_transform and exclude_modules are looked at for modules, not for what
# target_parameters names, by which alone PEFT reaches fused experts: these are adapted in all layers, while attention,
# by the same LoraConfig, is in the chosen ones only. No warning. Right for experts whose full paths are given. Hurts
# whoever trains a few layers: most of the adapter, its memory and its effect is where it was not asked for.
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
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4,
)
PARTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
PATHS = [f"layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: attention and experts adapted in layer 0 alone, or a warning")
seen = []
for options in (
    PARTS | {"layers_to_transform": [0]},
    PARTS | {"exclude_modules": r".*layers\.[12]\..*"},
    PARTS | {"layers_to_transform": [0], "target_parameters": PATHS},
):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        model = get_peft_model(MixtralForCausalLM(CONFIG), LoraConfig(r=4, **options))
    said = [str(warning.message) for warning in raised if issubclass(warning.category, (UserWarning, RuntimeWarning))]
    factors = [name for name, _ in model.named_parameters() if "lora_A" in name]
    where = {
        part: sorted({int(name.split("layers.")[1].split(".")[0]) for name in factors if part in name})
        for part in ("self_attn", "experts")
    }
    seen.append((where, len(said)))
    print(f"{options}\n    layers with factors: {where}; warnings: {said}")
every, first = ({"self_attn": [0], "experts": layers} for layers in ([0, 1, 2], [0]))
sys.exit(0 if seen == [(every, 0), (every, 0), (first, 0)] else "changed since this was found")
EOF
