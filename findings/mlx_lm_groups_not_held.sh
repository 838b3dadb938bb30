#!/usr/bin/env bash
# mlx-lm 0.32.2: DeepSeek-V3, GLM-4.5 and dots.llm1 choose groups of experts first, and the experts of the other groups
# get the score 0, not minus infinity. Where correction biases make the scores of a chosen group negative, a token goes
# to experts of groups that were not chosen. No warning. Right where scores are positive. Hurts whoever trains or serves
# such a model there: transformers computes other experts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF' 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
import json
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, Dots1Config, Glm4MoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
SIZES |= {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 1}
SIZES |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"head_dim": 16, "rope_interleave": True}
READ = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "rope_scaling": None}
READ |= {"partial_rotary_factor": 0.5, "use_qk_norm": False, "rope_theta": 10000.0}  # names that mlx-lm reads
IDS = torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(0))
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print("expected: the logits of transformers, whatever the biases")
seen = []
for config in (DeepseekV3Config, Glm4MoeConfig, Dots1Config):
    for bias in (0.5, -2.0):  # a sigmoid and this: positive or negative for every expert
        torch.manual_seed(0)
        settings = config(**SIZES | (LATENT if config is DeepseekV3Config else {}))
        model = AutoModelForCausalLM.from_config(settings).eval()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.fill_(bias)
        model.save_pretrained(path := Path(sys.argv[1]) / f"{settings.model_type}{bias}")
        saved = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(saved | READ))
        logits = np.array(load_model(path)[0](mx.array(IDS.tolist())).astype(mx.float32))
        with torch.no_grad():
            difference = abs(logits - model(IDS).logits.numpy()).max()
        seen.append(difference < 1e-3)
        print(f"{settings.model_type}, biases of {bias}: logits differ by {difference:.1e}")
sys.exit(0 if seen == [True, False] * 3 else "changed since this was found")
EOF
