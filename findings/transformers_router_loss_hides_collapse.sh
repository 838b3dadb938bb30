#!/usr/bin/env bash
# transformers 5.23.0: load_balancing_loss_func joins the tokens of all layers before it averages, so it sees how often
# expert 3 of *any* layer was chosen. Two layers that send every token to the same two of four experts have the loss of a
# perfect balance if they are not the same two. Hurts whoever trains with output_router_logits, or reads the loss to see
# whether routing has collapsed: layers that collapse onto different experts neither cost nor show.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
"$folder/venv/bin/python" - <<'EOF'
import sys

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def logits(*pairs: list[int]) -> torch.Tensor:
    """Router logits of 64 tokens of a layer with 4 experts: each token in turn goes to the next of `pairs`."""
    chosen = torch.full((64, 4), -8.0)
    for token in range(64):
        chosen[token, pairs[token % len(pairs)]] = 8.0
    return chosen


def loss(*layers: torch.Tensor) -> float:
    return load_balancing_loss_func(layers, num_experts=4, top_k=2).item()


print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: the loss of two layers is the mean of theirs")
balanced, low, high = logits([0, 1], [2, 3]), logits([0, 1]), logits([2, 3])
alone = {"balanced": loss(balanced), "all to 0 and 1": loss(low), "all to 2 and 3": loss(high)}
together = {
    "both balanced": loss(balanced, balanced),
    "both to 0 and 1": loss(low, low),
    "one to 0 and 1, one to 2 and 3": loss(low, high),
}
for name, value in (alone | together).items():
    print(f"{name}: {value:.3f}")
seen = [round(value, 2) for value in (*alone.values(), *together.values())]
sys.exit(0 if seen == [2.0, 4.0, 4.0, 2.0, 4.0, 2.0] else "changed since this was found")
EOF
