#!/usr/bin/env bash
# mlx-lm 0.32.2: the classes of Qwen3-MoE, Qwen2-MoE, Mixtral and GLM-4.5 have a field rope_scaling, and compute without
# it: YaRN, with which Qwen's cards reach 131,072 tokens, and linear scaling, the one type that Qwen2-MoE's class checks
# for and allows, change nothing. No warning. Right in OLMoE, and without scaling. Hurts whoever trains with longer
# positions and serves there: the model is another one, at short prompts too.
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
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts_per_tok": 2}
SIZES |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "max_position_embeddings": 1024}
GLM = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
GLM |= {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "routed_scaling_factor": 1.0, "use_qk_norm": False}
TYPES = (  # a configuration, its own settings, whether it heeds the scaling
    (OlmoeConfig, {"num_experts": 8}, True),
    (Qwen3MoeConfig, {"num_experts": 8, "norm_topk_prob": True}, False),
    (Qwen2MoeConfig, {"num_experts": 8, "norm_topk_prob": False}, False),
    (MixtralConfig, {"num_local_experts": 8}, False),
    (Glm4MoeConfig, GLM, False),
)
LINEAR = {"rope_type": "linear", "type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
IDS = torch.randint(3, 96, (1, 64), generator=torch.Generator().manual_seed(0))


def difference(config, settings, scaling):
    """Return by how much logits of mlx-lm and transformers differ at most."""
    torch.manual_seed(0)
    scaled = scaling or {"rope_type": "default"}
    made = config(**SIZES, **settings, rope_parameters=scaled | {"rope_theta": 1e4})
    model = AutoModelForCausalLM.from_config(made).eval()
    model.save_pretrained(path := Path(sys.argv[1]) / f"{made.model_type}-{scaled['rope_type']}")
    saved = json.loads((path / "config.json").read_text())
    old = {"rope_theta": 1e4, "rope_scaling": scaling, "attention_bias": False} | settings  # names that mlx-lm reads
    (path / "config.json").write_text(json.dumps(saved | old))
    logits = np.array(load_model(path)[0](mx.array(IDS.tolist())).astype(mx.float32))
    with torch.no_grad():
        return abs(logits - model(IDS).logits.numpy()).max()


print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print("expected: the logits of transformers, or an error that names the setting")
as_found = True
for config, settings, heeded in TYPES:
    scalings = [None, LINEAR] + [YARN] * (config is not Qwen2MoeConfig)  # whose class refuses other types
    found = [difference(config, settings, scaling) for scaling in scalings]
    kinds = ", ".join(f"{(s or {}).get('rope_type')} {value:.1e}" for s, value in zip(scalings, found, strict=True))
    print(f"{config.model_type}: logits differ by: {kinds}")
    as_found &= found[0] < 1e-3 and all((value < 1e-3) == heeded for value in found[1:])
sys.exit(0 if as_found else "changed since this was found")
EOF
