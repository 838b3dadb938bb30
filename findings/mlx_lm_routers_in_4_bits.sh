#!/usr/bin/env bash
# mlx-lm 0.32.2: `convert -q` packs the routers of Mixtral, OLMoE, Qwen2-MoE and ERNIE 4.5 in as few bits as all else,
# 4 by default: 7 % of the choices of this toy's routers are of another expert then. No warning. Right in Qwen3-MoE and
# GraniteMoE, whose classes ask for 8 bits: under 1 %. Hurts whoever trains routers and serves them there: what they
# learned is rounded away, to save one parameter in 40,000 (Mixtral).
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
import torch
from mlx_lm.utils import load_model, quantize_model
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, GraniteMoeConfig, MixtralConfig, OlmoeConfig
from transformers import Qwen2MoeConfig, Qwen3MoeConfig

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 64, "initializer_range": 0.2}
SIZES |= {"shared_expert_intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS, TOP_K, BITS = 32, 4, 4
TYPES = (
    (Qwen3MoeConfig, "num_experts"), (GraniteMoeConfig, "num_local_experts"), (MixtralConfig, "num_local_experts"),
    (OlmoeConfig, "num_experts"), (Qwen2MoeConfig, "num_experts"), (Ernie4_5_MoeConfig, "moe_num_experts"),
)
ROUTERS = (".mlp.gate", ".block_sparse_moe.gate", ".block_sparse_moe.router.layer")
rows = mx.random.normal((512, SIZES["hidden_size"]), key=mx.random.key(0))
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
print(f"expected: routers are left in 16 bits, or in 8, where experts have {BITS}")
seen = {}


def routers(model) -> dict:
    """Return name -> module, of the routers of a model of mlx-lm."""
    return {name: module for name, module in model.named_modules() if name.endswith(ROUTERS)}


def chosen(router) -> list[set]:
    """Return the experts that a router chooses for each of the rows."""
    return [set(row) for row in mx.argsort(router(rows), axis=-1)[:, -TOP_K:].tolist()]


for config, experts in TYPES:
    torch.manual_seed(0)
    settings = config(**SIZES, **{experts: EXPERTS}, num_experts_per_tok=TOP_K)
    path = Path(sys.argv[1]) / settings.model_type
    AutoModelForCausalLM.from_config(settings).save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    old = {"rope_theta": saved["rope_parameters"]["rope_theta"], experts: EXPERTS}  # names that mlx-lm reads
    (path / "config.json").write_text(json.dumps(saved | old))
    model, read = load_model(path)
    before = [chosen(router) for router in routers(model).values()]
    quantized, _ = quantize_model(model, read, group_size=64, bits=BITS)  # what `mlx_lm.convert -q` calls
    after = [chosen(router) for router in routers(quantized).values()]
    pairs = [pair for layer in zip(before, after, strict=True) for pair in zip(*layer, strict=True)]
    share = sum(len(old - new) for old, new in pairs) / (len(pairs) * TOP_K)
    (bits,) = {router.bits for router in routers(quantized).values()}
    seen[settings.model_type] = bits
    print(f"{settings.model_type}: routers of {bits} bits, {100 * share:.1f} % of the choices are of another expert")
as_found = list(seen.values()) == [8, 8, 4, 4, 4, 4]
sys.exit(0 if as_found else "changed since this was found")
EOF
