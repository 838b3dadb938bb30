#!/usr/bin/env bash
# peft 0.21.2: layers of `layer_replication` share the weights of the layer that they repeat, and each has a LoRA of its
# own. merge_and_unload (and merge_adapter) adds every LoRA to the shared weight: each copy then has the sum of both,
# and the merged model computes something else, without a word. Copies whose LoRA is the only one of its weight are
# merged rightly, and unmerged the adapter is right. Hurts whoever serves or evaluates a model grown this way merged.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import copy
import sys

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: merged, the model computes what it did before")
sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
rows = torch.arange(2, 34).view(2, 16)
seen = {}
for config, targets in (
    (
        LlamaConfig(**sizes, vocab_size=64, num_hidden_layers=3, use_cache=False),
        {"target_modules": ["q_proj", "up_proj"]},
    ),
    (
        MixtralConfig(**sizes, vocab_size=64, num_hidden_layers=3, num_local_experts=4, use_cache=False),
        {"target_modules": ["q_proj"], "target_parameters": experts},
    ),
):
    for layers in ([[0, 3]], [[0, 2], [1, 3]]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        replication = layers if len(layers) > 1 else None
        lora = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, layer_replication=replication, **targets)
        model = get_peft_model(model, lora).eval()
        before = model(rows).logits
        weights = [layer.self_attn.q_proj.get_delta_weight("default") for layer in model.base_model.model.model.layers]
        merged = model.merge_and_unload()
        off = ((merged(rows).logits - before).norm() / before.norm()).item()
        print(f"{config.model_type}, layers {layers}: {len(weights)} LoRAs on q_proj, logits {off:.1%} off when merged")
        seen[config.model_type, len(layers)] = off
        if replication:
            first, second = (merged.model.layers[number].self_attn.q_proj.weight for number in (1, 2))
            print("  layers 1 and 2 are one weight after merging:", torch.equal(first, second))
as_found = all(off > 0.02 if ranges == 2 else off < 1e-4 for (_, ranges), off in seen.items())
sys.exit(0 if as_found else "changed since this was found")
EOF
