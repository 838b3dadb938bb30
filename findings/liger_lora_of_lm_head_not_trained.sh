#!/usr/bin/env bash
# liger-kernel 0.8.5 with peft 0.21.2: a model with its fused loss computes the loss of training from `lm_head.weight`,
# which is the frozen weight where lm_head has a LoRA: its factors get no gradient and stay as they were, while the rest
# trains. Loss, log and saved adapter look as ever, and evaluation applies the factors. Its Llama does so too: it looks
# for other wrappers (modules_to_save is right). Without liger-kernel the factors train. Hurts whoever fine-tunes
# lm_head by LoRA under use_liger_kernel. (Triton's interpreter takes the place of a GPU; no other kernel is applied.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  torch==2.13.0 transformers==5.23.0 peft==0.21.2 liger-kernel==0.8.5 triton==3.9.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1 TRITON_INTERPRET=1
"$folder/venv/bin/python" - <<'EOF'
import importlib.metadata
import sys

import peft
import torch
import transformers
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("liger-kernel", importlib.metadata.version("liger-kernel"))
print("expected: the loss and the gradients of training without liger-kernel")
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
seen = {}
for config in (
    Qwen3MoeConfig(**sizes, num_hidden_layers=1, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    LlamaConfig(**sizes, num_hidden_layers=1, intermediate_size=32),
):
    for how, options in (
        ("LoRA on lm_head", {"target_modules": ["q_proj", "lm_head"]}),
        ("lm_head whole", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ):
        for liger in (False, True):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            if liger:
                _apply_liger_kernel_to_instance(model=model, rope=False, rms_norm=False, swiglu=False)
            model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **options))
            rows = torch.arange(2, 34).view(2, 16)
            model.train()
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            model.eval()
            evaluated = model(input_ids=rows, labels=rows).loss.item()
            trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
            idle = [name.split("model.model.")[-1] for name, weight in trained.items() if weight.grad is None]
            seen[config.model_type, how, liger] = (bool(idle), abs(loss.item() - evaluated) < 1e-4)
            program = "liger-kernel" if liger else "transformers"
            print(f"{config.model_type}, {how}, {program}: training loss {loss.item():.4f}, evaluated {evaluated:.4f}")
            print("  without a gradient:", idle)
fault = {case: result for case, result in seen.items() if case[1] == "LoRA on lm_head" and case[2]}
right = {case: result for case, result in seen.items() if case not in fault}
as_found = set(fault.values()) == {(True, False)} and set(right.values()) == {(False, True)}
sys.exit(0 if as_found else "changed since this was found")
EOF
