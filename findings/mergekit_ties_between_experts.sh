#!/usr/bin/env bash
# mergekit 0.1.5: with transformers 5 it merges all experts of a layer as one tensor. The density of TIES (and of
# breadcrumbs) keeps the largest changes of a tensor, so experts compete: those whose weights moved least, for example
# because few tokens came to them, lose all of their fine-tuning, and those that moved most lose nothing. A projection
# of its own, such as q_proj, keeps its share however little it moved. dare_ties and della do not compare experts.
# Hurts whoever merges fine-tuned mixtures, which were merged expert by expert with transformers 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  torch==2.13.0 transformers==5.23.0 mergekit==0.1.5 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import copy
import importlib.metadata
import sys

import torch
import transformers
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
print("mergekit", importlib.metadata.version("mergekit"))
print("expected: of density 0.5, half of the changes of each expert")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
config = Qwen3MoeConfig(**sizes, num_hidden_layers=1, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
base = AutoModelForCausalLM.from_config(config)
tuned = copy.deepcopy(base)
layer = tuned.model.layers[0]
with torch.no_grad():
    for scale, weight in ((1e-2, layer.self_attn.q_proj.weight), (1e-4, layer.self_attn.k_proj.weight)):
        weight.add_(scale * torch.randn_like(weight))
    for expert in range(4):
        layer.mlp.experts.down_proj[expert].add_(10.0 ** -(2 + expert) * torch.randn(64, 32))
base.save_pretrained(f"{sys.argv[1]}/base")
tuned.save_pretrained(f"{sys.argv[1]}/tuned")
kept = {}
for method in ("ties", "breadcrumbs", "dare_ties"):
    source = {"model": f"{sys.argv[1]}/tuned", "parameters": {"weight": 1.0, "density": 0.5}}
    recipe = {"merge_method": method, "base_model": f"{sys.argv[1]}/base", "models": [source], "dtype": "float32"}
    target = f"{sys.argv[1]}/{method}"
    run_merge(MergeConfiguration(**recipe), target, MergeOptions(copy_tokenizer=False, write_model_card=False))
    merged = AutoModelForCausalLM.from_pretrained(target).model.layers[0]
    changed = {
        name: merged.get_parameter(name) != base.model.layers[0].get_parameter(name)
        for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.experts.down_proj")
    }
    shares = [tensor.float().mean().item() for tensor in list(changed.values())[:2]]
    kept[method] = changed["mlp.experts.down_proj"].float().mean((1, 2)).tolist()
    experts = ", ".join(f"{share:.2f}" for share in kept[method])
    print(f"{method}: of q_proj {shares[0]:.2f} is kept, of k_proj {shares[1]:.2f}, of experts {experts}")
    kept[method] += shares
as_found = all(kept[method][0] > 0.85 and kept[method][3] == 0 for method in ("ties", "breadcrumbs"))
as_found = as_found and all(abs(share - 0.5) < 0.05 for share in [*kept["dare_ties"], *kept["ties"][4:]])
sys.exit(0 if as_found else "changed since this was found")
EOF
