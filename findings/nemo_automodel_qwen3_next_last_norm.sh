#!/usr/bin/env bash
# nemo-automodel 0.7.0: the last norm of Qwen3-Next is multiplied by its weight, where the model's norms are multiplied
# by 1 + weight, as those within layers are here too. Logits of a checkpoint are others from the first step; what is
# trained to make up for it, and saved, is off in every other program. No warning: shapes are the same. Right for
# Qwen3-MoE, whose weights are no differences from 1. Hurts whoever fine-tunes Qwen3-Next.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 torchao==0.18.0 \
    tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { cat errors.txt; exit 1; }
import sys
from importlib.metadata import version

import torch
import transformers

torch.cuda.current_device = lambda: 0  # constructors ask for it; all is computed on the CPU
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from nemo_automodel.components.models.qwen3_next.model import Qwen3NextForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3NextConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
BACKEND = BackendConfig(attn="sdpa", linear="torch", experts="torch", dispatcher="torch", rope_fusion=False)
SIZES = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=64, num_hidden_layers=4,
    moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    shared_expert_intermediate_size=32,
)
KINDS = {
    "Qwen3-Next": (Qwen3NextForCausalLM, Qwen3NextConfig(**SIZES, **LINEAR)),
    "Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES)),
}
print("torch", torch.__version__, "transformers", transformers.__version__, "nemo-automodel", version("nemo-automodel"))
print("expected: the hidden states and logits of transformers")
seen = {}
for kind, (its_class, config) in KINDS.items():
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in base.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.init.normal_(base.model.norm.weight, mean=0.5, std=0.2)
    base.save_pretrained(kind)
    settings = type(config).from_pretrained(kind)
    settings.torch_dtype = torch.float32
    model = its_class(settings, backend=BACKEND).float().eval()
    model.model.rotary_emb.device = torch.device("cpu")
    model.load_state_dict(model.state_dict_adapter.from_hf(load_file(f"{kind}/model.safetensors")))
    rows = torch.randint(2, 60, (2, 64))
    entering = []
    for network in (base, model):
        network.model.norm.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    with torch.no_grad():
        logits = [network(rows).logits for network in (base, model)]
        before = (entering[0] - entering[1]).abs().max().item()
        model.model.norm.weight += 1
        with_one = (model(rows).logits - logits[0]).abs().max().item()
    off = (logits[0] - logits[1]).abs().max().item()
    print(f"{kind}: differs by {before:.1e} before the last norm, logits by {off:.1e}, "
          f"and by {with_one:.1e} once 1 is added to the norm's weight")
    seen[kind] = before < 1e-3, off > 0.5, with_one < 1e-3
as_found = {"Qwen3-Next": (True, True, True), "Qwen3-MoE": (True, False, False)}
sys.exit(0 if seen == as_found else "changed since this was found")
PY
