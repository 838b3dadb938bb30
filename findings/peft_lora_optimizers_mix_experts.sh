#!/usr/bin/env bash
# peft 0.21.2: its optimizers for LoRA, create_riemannian_optimizer and create_lorafa_optimizer, multiply the gradient
# of B by the inverse of A A^T. For fused experts A has the rows of all experts, in another order than B's columns: an
# expert gets the gradients of others, also one that no token reached. No warning. Right for each expert by itself, as
# for a linear layer. Hurts whoever trains LoRA on the experts of transformers 5: experts learn from tokens of others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF' 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
import sys
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer, create_riemannian_optimizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

EXPERTS, RANK = 4, 2
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": EXPERTS}
LORA = {"r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
LAYER = "base_model.model.model.layers.0."
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")))
print("expected: only expert 0 moves, whose gradient alone is not zero; of the linear layer all of B")
as_found = []
for name in ("create_riemannian_optimizer", "create_lorafa_optimizer"):
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES)), LoraConfig(**LORA))
    if name == "create_riemannian_optimizer":
        optimizer = create_riemannian_optimizer(model, torch.optim.SGD, lr=1.0)
    else:
        optimizer = create_lorafa_optimizer(model, r=RANK, lora_alpha=RANK, lr=1.0)
    parameters = {key: parameter for key, parameter in model.named_parameters() if "lora" in key}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    factors_b = parameters[LAYER + "mlp.experts.lora_B.default.weight"]
    factors_a = parameters[LAYER + "mlp.experts.lora_A.default.weight"].detach().unflatten(0, (EXPERTS, RANK))
    gradient = torch.zeros(len(factors_b), RANK, EXPERTS)  # PEFT's layout of B: the expert is the fastest index
    gradient[:, :, 0] = torch.randn(len(factors_b), RANK)
    factors_b.grad.copy_(gradient.flatten(1))
    attention = parameters[LAYER + "self_attn.q_proj.lora_B.default.weight"]
    attention.grad.copy_(gradient[:, :, 0])
    optimizer.step()
    moved = factors_b.detach().unflatten(1, (RANK, EXPERTS)).norm(dim=(0, 1))
    print(f"{name}: experts move by {[round(norm.item(), 2) for norm in moved]}")
    as_found.append(bool((moved > 0.1).all()))
    if name == "create_riemannian_optimizer":  # plain SGD beside it: the update is the gradient as it was multiplied
        linear = parameters[LAYER + "self_attn.q_proj.lora_A.default.weight"].detach()
        ratios = []
        for factors, update in ((linear, attention.detach()), (factors_a[0], factors_b.detach()[:, ::EXPERTS])):
            right = -gradient[:, :, 0] @ torch.linalg.inv(factors @ factors.T + 0.01 * torch.eye(RANK))
            ratios.append(((update - right).norm() / right.norm()).item())
        print(f"error of the update by its own factors: linear layer {ratios[0]:.1e}, expert 0 {ratios[1]:.1e}")
        as_found.append(ratios[0] < 1e-3 < 0.1 < ratios[1])
sys.exit(0 if all(as_found) else "changed since this was found")
EOF
