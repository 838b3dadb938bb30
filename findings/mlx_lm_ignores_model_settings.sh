#!/usr/bin/env bash
# mlx-lm 0.32.2: settings that its classes do not name are dropped as config.json is read: norm_topk_prob of Qwen2-MoE,
# the sliding window of Mixtral, clip_qkv of OLMoE. The model is loaded and computes something else. No warning. Right
# with their usual values, and norm_topk_prob of Qwen3-MoE is read. Hurts whoever trains with such a setting and serves
# there: what comes out is not what was trained.
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
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts_per_tok": 2}
SIZES |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
IDS = torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(0))
CASES = (  # a type of model, a setting, its usual value, another one
    (Qwen3MoeConfig, "norm_topk_prob", True, False),
    (Qwen2MoeConfig, "norm_topk_prob", False, True),
    (MixtralConfig, "sliding_window", None, 8),
    (OlmoeConfig, "clip_qkv", None, 0.5),
)
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print("expected: the logits of transformers, or an error that names the setting")
seen = []
for config, setting, *values in CASES:
    for value in values:
        torch.manual_seed(0)
        experts = {"num_local_experts" if config is MixtralConfig else "num_experts": 8}
        settings = config(**SIZES, **experts, **{setting: value})
        model = AutoModelForCausalLM.from_config(settings).eval()
        model.save_pretrained(path := Path(sys.argv[1]) / f"{settings.model_type}-{value}")
        saved = json.loads((path / "config.json").read_text())
        old = {"rope_theta": saved["rope_parameters"]["rope_theta"]} | experts  # names that mlx-lm reads
        (path / "config.json").write_text(json.dumps(saved | old))
        logits = np.array(load_model(path)[0](mx.array(IDS.tolist())).astype(mx.float32))
        with torch.no_grad():
            difference = abs(logits - model(IDS).logits.numpy()).max()
        seen.append(difference < 1e-3)
        print(f"{settings.model_type}, {setting} {saved[setting]}: logits differ by {difference:.1e}")
as_found = seen == [True, True, True, False, True, False, True, False]
sys.exit(0 if as_found else "changed since this was found")
EOF
