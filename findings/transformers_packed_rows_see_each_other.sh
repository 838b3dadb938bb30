#!/usr/bin/env bash
# transformers 5.23.0: documents packed into a row are told apart by position_ids that begin again at 0, but only if
# no cache is made: with use_cache as configs have it (true), a forward pass, in training mode too, makes one, and the
# second document sees the first. Layers with a state look at no position_ids at all: Qwen3-Next's, LFM2's and Granite
# hybrids' documents run into each other either way. No warning. Hurts losses of packed rows outside of Trainer (which
# sets use_cache=False), and packed training of hybrids.
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
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2,
}
TYPES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen3_next": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 16,
                   "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16},
    "lfm2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_dense_layers": 1,
                 "layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"num_local_experts": 4, "shared_intermediate_size": 32, "mamba_n_heads": 8,
                         "mamba_d_head": 16, "mamba_d_state": 16, "layer_types": ["mamba", "attention"] * 2},
}
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: logits of the second of two documents in a row are those that it has alone")
ids = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
packed = {"input_ids": ids, "position_ids": torch.arange(8).repeat(2)[None]}
differ = {}
for kind, sizes in TYPES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes)).train()
    with torch.no_grad():
        alone = model(ids[:, 8:]).logits
        for options in ({}, {"use_cache": False}):
            difference = (model(**packed, **options).logits[:, 8:] - alone).abs().max().item()
            differ[kind, not options] = difference > 1e-5
            print(f"{kind}, {options or 'as configured'}: differ by {difference:.4f}")
hybrid = {"qwen3_next", "lfm2_moe", "granitemoehybrid"}
as_found = all(seen == (is_default or kind in hybrid) for (kind, is_default), seen in differ.items())
sys.exit(0 if as_found else "changed since this was found")
EOF
