#!/usr/bin/env bash
# transformers 5.23.0: experts of a layer are one parameter, so an expert that no token of a step reached has a gradient
# of zeros, and AdamW moves it: by its momentum as far as one that was reached, and by weight decay for ever. With
# transformers 4.57.6 each expert was a module, had no gradient then, and stayed. Hurts whoever fine-tunes experts on
# data that few of them see, with the same script on both versions: the others drift.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cat >"$folder/step.py" <<'EOF'
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8,
    )
)
layer = model.model.layers[0]
mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
chosen = []
mlp.gate.register_forward_hook(lambda gate, args, output: chosen.append(output))


def experts():
    if isinstance(mlp.experts, torch.nn.ModuleList):
        return torch.stack([expert.w2.weight.detach().clone() for expert in mlp.experts])
    return mlp.experts.down_proj.detach().clone()


# All experts are reached in the first step, two in the second: it repeats one token.
for ids in (torch.randint(64, (4, 64)), torch.full((1, 2), 7)):
    before = experts()
    optimizer.zero_grad()
    chosen.clear()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
logits = chosen[0][0] if isinstance(chosen[0], tuple) else chosen[0]
reached = set(logits.topk(2, dim=-1).indices.flatten().tolist())
moved = (experts() - before).flatten(1).norm(dim=1)
idle = [moved[index].item() for index in range(8) if index not in reached]
busy = [moved[index].item() for index in reached]
print(f"transformers {transformers.__version__}, torch {torch.__version__}: experts {sorted(reached)} reached; they "
      f"moved by {min(busy):.3f} or more, the idle ones by at most {max(idle):.3f}")
sys.exit(0 if (max(idle) > 0.5 * min(busy)) is (sys.argv[1] == "moves") and (max(idle) > 0) is (sys.argv[1] == "moves")
         else "changed since this was found")
EOF
echo "expected: an expert that no token of a step reached stays as it is"
for version in 4.57.6:stays 5.23.0:moves; do
    python3.11 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 "transformers==${version%:*}" numpy==2.3.5
    "$folder/venv/bin/python" "$folder/step.py" "${version#*:}"
    rm -rf "$folder/venv"
done
