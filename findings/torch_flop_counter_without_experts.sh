#!/usr/bin/env bash
# torch 2.13.0 with transformers 5.23.0: FlopCounterMode has no entry for grouped_mm, by which transformers multiplies
# experts unless told otherwise, and counts what it does not know as nothing: a mixture of experts has the FLOPs of its
# attention and router, the same for one expert a token as for eight. No warning. Right with experts_implementation
# "eager". Hurts whoever compares models by FLOPs, or reports the share of a GPU's peak: it comes out far too low.
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
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

transformers.logging.set_verbosity_error()
TOKENS, HIDDEN, INNER = 64, 64, 128
print("torch", torch.__version__, "transformers", transformers.__version__)
print(f"expected: experts take {TOKENS} tokens x chosen experts x 6 x {HIDDEN} x {INNER} FLOPs in forward")
counted, exact = {}, []
for implementation in (None, "eager"):
    for chosen in (1, 8):
        model = MixtralForCausalLM(MixtralConfig(
            vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=chosen,
        ))
        if implementation:
            model.set_experts_implementation(implementation)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(TOKENS)[None])
        by_module = counter.get_flop_counts()
        experts = sum(sum(by.values()) for name, by in by_module.items() if name.endswith("mlp.experts"))
        counted[implementation, chosen] = counter.get_total_flops()
        exact.append(experts == TOKENS * chosen * 6 * HIDDEN * INNER)
        print(f"{implementation or 'as it comes'} ({model.config._experts_implementation}), {chosen} experts a token: "
              f"{experts:,} for experts, {counted[implementation, chosen]:,} in all")
as_found = exact == [False, False, True, True] and counted[None, 1] == counted[None, 8] < counted["eager", 1]
sys.exit(0 if as_found else "changed since this was found")
EOF
