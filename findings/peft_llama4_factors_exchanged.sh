#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: Llama 4 and gpt-oss store their experts' matrices alike, [experts, in, out].
# With target_parameters PEFT's lora_A of gpt-oss maps from the inputs; of Llama 4, whose class has no mark
# `is_transposed`, it maps from the outputs and lora_B to the inputs. Loaded and merged by PEFT both compute the same,
# but a program that goes by the names A and B, or by the layout of the weights, gets the other matrix; where a matrix
# is square, in silence.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 1, "num_local_experts": 4, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: weights that are stored alike have lora_A [4·r, 64], from the 64 inputs, in both types")
inputs = {}
for kind, more in {"gpt_oss": {}, "llama4_text": {"intermediate_size_mlp": 48}}.items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))
    (name, stored), = [(n, p) for n, p in model.named_parameters() if n.endswith("experts.gate_up_proj")]
    lora = LoraConfig(r=2, target_modules=[], target_parameters=[name.partition("layers.0.")[2]])
    adapted = get_peft_model(model, lora)
    (A,) = [parameter for key, parameter in adapted.named_parameters() if "lora_A" in key]
    (B,) = [parameter for key, parameter in adapted.named_parameters() if "lora_B" in key]
    inputs[kind] = A.shape[1]
    print(f"{kind}: gate_up_proj {[*stored.shape]}, lora_A {[*A.shape]}, lora_B {[*B.shape]}")
sys.exit(0 if inputs == {"gpt_oss": 64, "llama4_text": 96} else "changed since this was found")
EOF
