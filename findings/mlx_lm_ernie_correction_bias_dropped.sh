#!/usr/bin/env bash
# mlx-lm 0.32.2: of ERNIE 4.5 it drops e_score_correction_bias as it loads the weights, which is added to the scores by
# which the experts of a token are chosen: tokens go to other experts than in training. No warning. Right if all biases
# are zero; and of GLM-4.5, whose routers have such a bias too, mlx-lm reads it. Hurts whoever serves or fine-tunes
# ERNIE 4.5 there: a part of what each layer computes comes from experts that the router did not choose.
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
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, Glm4MoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 32}
IDS = torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(0))
CONFIGS = (
    Ernie4_5_MoeConfig(**SIZES, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=0),
    Glm4MoeConfig(**SIZES, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=0),
)
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print("expected: the logits of transformers, whether the correction biases are zero or not")
off = {}
for config in CONFIGS:
    for spread in (0.0, 0.2):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, buffer in (*model.named_buffers(), *model.named_parameters()):
            if "e_score_correction_bias" in name:
                torch.nn.init.normal_(buffer, std=spread)
        model.save_pretrained(path := Path(sys.argv[1]) / f"{config.model_type}-{spread}")
        saved = json.loads((path / "config.json").read_text())
        rope = saved["rope_parameters"]  # which mlx-lm does not read
        old = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
        old["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
        (path / "config.json").write_text(json.dumps(saved | old))
        logits = np.array(load_model(path)[0](mx.array(IDS.tolist())).astype(mx.float32))
        with torch.no_grad():
            off[config.model_type, spread] = abs(logits - model(IDS).logits.numpy()).max()
        print(f"{config.model_type}, biases of spread {spread}: logits differ by {off[config.model_type, spread]:.1e}")
wrong = off.pop(("ernie4_5_moe", 0.2))
sys.exit(0 if max(off.values()) < 1e-3 < 0.1 < wrong else "changed since this was found")
EOF
