#!/usr/bin/env bash
# transformers 5.23.0 with bitsandbytes 0.50.2: load_in_4bit=True quantizes nn.Linear, and experts are parameters of
# three dimensions since transformers 5. So a mixture of experts loads with its experts, nineteen weights of twenty, in 16
# bits, and calls itself quantized. No warning. Hurts whoever knows from transformers 4 that Mixtral-8x7B takes 24 GiB:
# it takes 85, or is spread over the host by device_map="auto".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  torch==2.13.0 transformers==5.23.0 bitsandbytes==0.50.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/model" <<'EOF'
import sys
import warnings

import bitsandbytes
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig, Qwen3MoeConfig

transformers.logging.disable_progress_bar()
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
print("torch", torch.__version__, "transformers", transformers.__version__, "bitsandbytes", bitsandbytes.__version__)
print("expected: experts in 4 bits (uint8), or a warning")
as_found = True
for config in (
    MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=8),
    Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, head_dim=16),
):
    folder = f"{sys.argv[1]}-{config.model_type}"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        quantize = BitsAndBytesConfig(load_in_4bit=True)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantize, dtype=torch.bfloat16)
    layer = model.model.layers[0]
    dtypes = {"q_proj": layer.self_attn.q_proj.weight.dtype, "experts": layer.mlp.experts.gate_up_proj.dtype}
    said = [str(warning.message) for warning in raised if "expert" in str(warning.message)]
    print(f"{config.model_type}: is_quantized {model.is_quantized}, {dtypes}, warnings about experts: {said}")
    as_found = as_found and model.is_quantized and not said
    as_found = as_found and list(dtypes.values()) == [torch.uint8, torch.bfloat16]
sys.exit(0 if as_found else "changed since this was found")
EOF
