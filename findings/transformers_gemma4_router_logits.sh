#!/usr/bin/env bash
# transformers 5.23.0: `router_logits` of Gemma 4 are probabilities: its router gives them after the softmax, where those
# of nearly every other type give logits. A loss or a count that takes their softmax, as
# load_balancing_loss_func does, takes it twice and finds nearly even probabilities: 2.03 here where 2.18 is right. No
# warning. Right in Mixtral. Hurts whoever balances or watches the routers of Gemma 4.
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
from transformers import AutoModelForCausalLM, Gemma4TextConfig, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS, TOP_K = 8, 2
GEMMA = {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": TOP_K, "global_head_dim": 8}
GEMMA |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96}
IDS = torch.randint(3, 96, (1, 64), generator=torch.Generator().manual_seed(0))
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: router_logits are logits, whose softmax chooses and weighs experts")
seen = []
for config in (
    MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K),
    Gemma4TextConfig(**SIZES, **GEMMA),
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    routed = []  # the routing weights that experts are multiplied by, of each layer [tokens, TOP_K]
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "router.proj.weight")):
            torch.nn.init.normal_(parameter, std=2.0)
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".router")):
            module.register_forward_hook(lambda module, given, out: routed.append(out[1]))
    with torch.no_grad():
        logits = model(IDS, output_router_logits=True).router_logits
        loss = load_balancing_loss_func(logits, EXPERTS, TOP_K).item()
    chosen = [layer.softmax(dim=-1).topk(TOP_K).values for layer in logits]
    errors = [
        (weights.sort(dim=-1).values - (top / top.sum(dim=-1, keepdim=True)).sort(dim=-1).values).abs().max().item()
        for weights, top in zip(routed, chosen, strict=True)
    ]
    sums = [layer.sum(dim=-1) for layer in logits]
    probabilities = all(bool(((total - 1).abs() < 1e-4).all()) for total in sums)
    right = loss
    if probabilities:
        right = load_balancing_loss_func(tuple(layer.log() for layer in logits), EXPERTS, TOP_K).item()
    seen.append((probabilities, max(errors) > 0.1, right - loss > 0.1))
    print(
        f"{config.model_type}: rows of router_logits sum to 1: {probabilities}; routing weights are {max(errors):.2f} "
        f"from those of their softmax; router loss {loss:.2f}, of the router's own probabilities {right:.2f}"
    )
as_found = seen == [(False, False, False), (True, True, True)]
sys.exit(0 if as_found else "changed since this was found")
EOF
