#!/usr/bin/env bash
# nemo-automodel 0.7.0: `dropout` of its PeftConfig reaches the LoRA of linear layers and not that of experts, most of an
# adapter's weights: what is trained there is trained without it, and `automodel_peft_config.json` says that it had it.
# No warning, where PEFT refuses dropout on experts by name. Right for attention. Hurts whoever sets dropout because the
# data are few, or compares rates of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 peft==0.21.2 accelerate==1.15.0 \
    torchao==0.18.0 tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { tail -n 15 errors.txt; exit 1; }
import sys
from importlib.metadata import version

import torch

torch.cuda.current_device = lambda: 0  # constructors ask for it; all is computed on the CPU
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

BACKEND = BackendConfig(attn="sdpa", linear="torch", experts="torch", dispatcher="torch", rope_fusion=False)
CONFIG = Qwen3MoeConfig(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64, num_hidden_layers=2,
    moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, dtype=torch.float32,
)
PARTS = {"attention": "*o_proj", "experts": "*mlp.experts"}
DROPOUT = 0.5
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "nemo-automodel", "peft")))
print(f"expected: with dropout {DROPOUT} two forward passes in training differ, or an error")
seen = {}
for part, name in PARTS.items():
    for dropout in (0.0, DROPOUT):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(CONFIG, backend=BACKEND).float()
        model.model.rotary_emb.device = torch.device("cpu")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
        apply_lora_to_linear_modules(model, PeftConfig(target_modules=[name], dim=4, alpha=8, dropout=dropout))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            torch.nn.init.normal_(parameter, std=0.2)
        rows = torch.randint(0, 64, (2, 32))
        with torch.no_grad():
            first, second = (model.train()(rows).logits for _ in range(2))
        off = (first - second).abs().max().item()
        count = sum(parameter.numel() for parameter in trained)
        print(f"LoRA on {part} ({count} weights), dropout {dropout}: two passes differ by {off:.1e}")
        seen[part, dropout] = off > 0.01
settings = LoraConfig(lora_dropout=DROPOUT, target_modules=[], target_parameters=["mlp.experts.down_proj"])
try:
    get_peft_model(AutoModelForCausalLM.from_config(CONFIG), settings)
    refused = "nothing"
except ValueError as error:
    refused = str(error)
print("PEFT, LoRA on experts with dropout:", refused)
wanted = {(part, dropout): part == "attention" and dropout > 0 for part, dropout in seen}
sys.exit(0 if seen == wanted and "lora_dropout" in refused else "changed since this was found")
PY
