#!/usr/bin/env bash
# transformers 5.23.0: max_window_layers means three things. With use_sliding_window: true the layers from that number
# on have the window in Qwen2 and Qwen3, every other layer before it in Qwen2-MoE, and all layers in Qwen3-MoE, whose
# published 30B-A3B has 48 of 48: no layer by the first rule. No warning. Hurts whoever turns the window on for long
# rows: layers that should see all tokens see the last few.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
SIZES |= {"num_experts": 4, "num_experts_per_tok": 2}
LAYERS, FIRST, WINDOW, TOKENS = 6, 4, 4, 12
IDS = torch.arange(3, 3 + TOKENS)[None]
print("torch", torch.__version__, "transformers", transformers.__version__)
print(f"expected: layers {list(range(FIRST, LAYERS))} have the window")
seen = {}
for config in (Qwen2Config, Qwen3Config, Qwen2MoeConfig, Qwen3MoeConfig):
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": FIRST}
    settings = config(**SIZES, **window, num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    weights = model(IDS, output_attentions=True).attentions  # of each layer [1, heads, tokens, tokens]
    windows = [layer for layer, weight in enumerate(weights) if weight[0, :, -1, :-WINDOW].abs().max() == 0]
    seen[settings.model_type] = windows
    print(f"{settings.model_type}: layers {windows} do not see tokens further back than {WINDOW}")
as_found = list(seen.values()) == [[4, 5], [4, 5], [0, 2], [0, 1, 2, 3, 4, 5]]
sys.exit(0 if as_found else "changed since this was found")
EOF
