#!/usr/bin/env bash
# transformers 5.23.0: settings of routing that a type of model has in its configuration and does not read. Phi-3.5-MoE
# computes two experts of a token whatever num_experts_per_tok says, and DeepSeek-V2 leaves the weights of its experts
# as they are with norm_topk_prob: true, which its own code divides by their sum. No warning. Right in OLMoE, where both
# hold. Hurts whoever prunes or trains with fewer experts, or takes the setting from another implementation.
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
from transformers import AutoModelForCausalLM, DeepseekV2Config, OlmoeConfig, PhimoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 0}
CASES = (
    (OlmoeConfig, {"num_experts": 8}, ("num_experts_per_tok", "norm_topk_prob")),
    (PhimoeConfig, {"num_local_experts": 8}, ("num_experts_per_tok",)),
    (DeepseekV2Config, LATENT, ("num_experts_per_tok", "norm_topk_prob")),
)
VALUES = {"num_experts_per_tok": (2, 1), "norm_topk_prob": (False, True)}
IDS = torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(0))
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: other values of these settings give other logits")
seen = {}
for config, fields, settings in CASES:
    for setting in settings:
        logits = []
        for value in VALUES[setting]:
            torch.manual_seed(0)
            chosen = SIZES | fields | {"num_experts_per_tok": 2, setting: value}
            model = AutoModelForCausalLM.from_config(config(**chosen))
            with torch.no_grad():
                logits.append(model.eval()(IDS).logits)
        difference = (logits[0] - logits[1]).abs().max().item()
        seen[config.model_type, setting] = difference > 0
        print(f"{config.model_type}, {setting} {' or '.join(map(str, VALUES[setting]))}: logits differ by {difference:.2g}")
ignored = [case for case, differs in seen.items() if not differs]
as_found = ignored == [("phimoe", "num_experts_per_tok"), ("deepseek_v2", "norm_topk_prob")]
sys.exit(0 if as_found else "changed since this was found")
EOF
