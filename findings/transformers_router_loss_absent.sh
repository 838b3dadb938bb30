#!/usr/bin/env bash
# transformers 5.23.0: Llama 4, and classifiers of every type, take output_router_logits=True and router_aux_loss_coef
# and have no router loss: their loss is the same with any coefficient. No warning. Right in the class for causal
# language modelling of Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss. Hurts whoever trains the routers of Llama 4, or of a
# reward model: nothing keeps the load of experts balanced.
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
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": 0,
    "shared_expert_intermediate_size": 16, "intermediate_size_mlp": 48, "num_labels": 3,
}
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = {
    AutoModelForCausalLM: IDS,
    AutoModelForSequenceClassification: torch.tensor([0, 2]),
    AutoModelForTokenClassification: IDS % 3,
}
TYPES = (MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig, GptOssConfig)
CASES = [(auto, config, auto is AutoModelForCausalLM) for config in TYPES for auto in LABELS]
CASES.append((AutoModelForCausalLM, Llama4TextConfig, False))  # the class, the type, whether it has the router loss

documented = [line.strip() for line in Llama4TextConfig.__doc__.splitlines()]
at = next(index for index, line in enumerate(documented) if line.startswith("router_aux_loss_coef"))
print("torch", torch.__version__, "transformers", transformers.__version__)
print(f"the documentation of Llama 4's router_aux_loss_coef: {documented[at + 1]}")
print("expected: a loss that grows with router_aux_loss_coef in every class that takes it, or an error")
as_found = True
for auto, config, has in CASES:
    experts = {"num_experts" if config in (Qwen2MoeConfig, Qwen3MoeConfig) else "num_local_experts": 4}
    losses = []
    for coefficient in (0.0, 1.0):
        settings = config(**SIZES, **experts, output_router_logits=True, router_aux_loss_coef=coefficient)
        torch.manual_seed(0)
        losses.append(auto.from_config(settings)(input_ids=IDS, labels=LABELS[auto]).loss.item())
    grown, name = losses[1] - losses[0], auto.__name__.removeprefix("AutoModelFor")
    print(f"{name} of {config.model_type}: a coefficient of 1 adds {grown:.2f} to the loss")
    as_found &= grown > 1 if has else grown == 0
sys.exit(0 if as_found else "changed since this was found")
EOF
