#!/usr/bin/env bash
# mlx-lm 0.32.2 with transformers 5.23.0: a configuration that transformers 5 saves says the base of the rotary positions
# in rope_parameters.rope_theta alone, which mlx-lm reads for none of Llama, Mixtral, OLMoE and Qwen2-MoE: it takes a
# default of its own, without a message. With rope_theta at the top, as transformers 4 wrote it, all is right. Hurts
# checkpoints that transformers 5 saved, of models whose base is not the default: the longer the text, the more.
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
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
IDS = torch.randint(3, 96, (1, 32), generator=torch.Generator().manual_seed(0))
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print("expected: the logits of transformers, with rope_theta 500000 as saved")
off = {}
for config in (LlamaConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig):
    torch.manual_seed(0)
    sizes = SIZES | (MOE if config is not LlamaConfig else {})
    settings = config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    model = AutoModelForCausalLM.from_config(settings).eval()
    model.save_pretrained(path := Path(sys.argv[1]) / settings.model_type)
    saved = json.loads((path / "config.json").read_text())
    for name, more in (("as saved", {}), ("with rope_theta at the top too", {"rope_theta": 500000.0})):
        (path / "config.json").write_text(json.dumps(saved | more))
        logits = np.array(load_model(path)[0](mx.array(IDS.tolist())).astype(mx.float32))
        with torch.no_grad():
            difference = abs(logits - model(IDS).logits.numpy()).max()
        off.setdefault(name, []).append(difference)
        print(f"{settings.model_type}, {name}: logits differ by {difference:.1e}")
as_saved, with_both = off.values()
sys.exit(0 if max(with_both) < 1e-3 < 1e-2 < min(as_saved) else "changed since this was found")
EOF
