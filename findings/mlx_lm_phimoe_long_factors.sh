#!/usr/bin/env bash
# mlx-lm 0.32.2: Phi-3.5-MoE is computed with longrope's long factors at every length; up to
# original_max_position_embeddings (4096), where most prompts are, they should be the short ones. short_factor and
# short_mscale are read and not used. No warning. Right where both are the same. Hurts whoever serves what was trained
# on rows of up to that length, as transformers trains it: the model is another one.
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
from transformers import AutoModelForCausalLM, PhimoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
SIZES |= {"attention_bias": True, "lm_head_bias": True, "max_position_embeddings": 256}
PRETRAINED = 64
IDS = torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(0))  # shorter than PRETRAINED
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print(f"expected: the logits of transformers, whose frequencies at {IDS.shape[1]} positions are those of short_factor")
seen = []
for short, long in ((1.0, 1.0), (4.0, 4.0), (1.0, 4.0)):
    rope = {
        "rope_type": "longrope", "short_factor": [short] * 8, "long_factor": [long] * 8, "short_mscale": 1.0,
        "long_mscale": 1.0, "original_max_position_embeddings": PRETRAINED,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(PhimoeConfig(**SIZES, rope_parameters=rope | {"rope_theta": 1e4})).eval()
    model.save_pretrained(path := Path(sys.argv[1]) / f"{short}-{long}")
    old = {"rope_theta": 1e4, "rope_scaling": rope, "original_max_position_embeddings": PRETRAINED}  # names mlx-lm reads
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | old))
    logits = np.array(load_model(path)[0](mx.array(IDS.tolist())).astype(mx.float32))
    with torch.no_grad():
        difference = abs(logits - model(IDS).logits.numpy()).max()
    seen.append(difference < 1e-3)
    print(f"short_factor {short}, long_factor {long}: logits differ by {difference:.1e}")
sys.exit(0 if seen == [True, True, False] else "changed since this was found")
EOF
