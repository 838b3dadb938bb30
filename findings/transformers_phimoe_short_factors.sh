#!/usr/bin/env bash
# transformers 5.23.0: the rotary embedding of Phi-3.5-MoE takes longrope's short factors at every length. Beyond
# original_max_position_embeddings (4096) they should be the long ones, of up to 65 instead of 2.8 in the published
# model: only the scale beside them changes there. No warning. Right up to that length, and in Phi-3, with the same
# settings, at all. Hurts whoever trains or serves this model on long rows: positions turn faster than in its pretraining.
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
from transformers import Phi3Config, PhimoeConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

transformers.logging.set_verbosity_error()
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
SHORT, LONG, PRETRAINED, LONGEST = 1.5, 24.0, 64, 1024
ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": PRETRAINED,
    "short_factor": [SHORT] * 8, "long_factor": [LONG] * 8, "attention_factor": 1.0,
    "short_mscale": 1.0, "long_mscale": 1.0,  # Phi-3.5-MoE names the scale of cosines itself
}
LENGTHS = {"max_position_embeddings": LONGEST, "original_max_position_embeddings": PRETRAINED}
print("torch", torch.__version__, "transformers", transformers.__version__)
print(f"expected: frequencies are divided by {SHORT} up to {PRETRAINED} positions, by {LONG} beyond")
seen = []
for config, rotary in ((Phi3Config, Phi3RotaryEmbedding), (PhimoeConfig, PhimoeRotaryEmbedding)):
    settings = config(**SIZES, **LENGTHS, rope_parameters=dict(ROPE))
    module = rotary(settings)
    for length in (PRETRAINED, 512):
        cosines, _ = module(torch.zeros(1, length, 64), torch.arange(length)[None])
        positions = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
        fits = [factor for factor in (SHORT, LONG) if (cosines[0, :, :8] - (positions / factor).cos()).abs().max() < 1e-3]
        seen.append(fits)
        print(f"{config.model_type}, {length} positions: divided by {fits}")
sys.exit(0 if seen == [[SHORT], [LONG], [SHORT], [SHORT]] else "changed since this was found")
EOF
