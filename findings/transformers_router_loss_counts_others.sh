#!/usr/bin/env bash
# transformers 5.23.0: where a correction bias takes part in the choice (MiniMax-M2, Laguna, ERNIE 4.5), the router loss
# counts the experts with the largest softmax(logits) instead of those chosen, as if there were no bias. If the bias sends
# every token to the same two of eight experts, the loss and so its gradient are what they were without: it does not see
# that, and where the bias evens out the load, it works against it. Hurts whoever trains these with output_router_logits.
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
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

transformers.logging.set_verbosity_error()
CONFIG = MiniMaxM2Config(
    vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
)
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: the router loss is that of the experts chosen, and another where all tokens choose the same two")


def measured(bias: list[float]) -> tuple[float, float, float]:
    """Return the router loss, that of the experts which were chosen, and the share of tokens of the fullest expert."""
    torch.manual_seed(0)
    model = MiniMaxM2ForCausalLM(CONFIG).eval()
    torch.nn.init.normal_(model.model.layers[0].mlp.gate.weight, std=0.1)
    model.model.layers[0].mlp.e_score_correction_bias.copy_(torch.tensor(bias))
    seen = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with torch.no_grad():
        output = model(torch.randint(64, (4, 256)), output_router_logits=True)
    share = torch.bincount(seen[0].flatten(), minlength=8) / len(seen[0])
    right = 8 * (share * output.router_logits[0].softmax(-1).mean(0)).sum()
    return output.aux_loss.item(), right.item(), share.max().item()


rows = {}
for name, bias in {"none": [0.0] * 8, "sends all to two": [9.0, 9.0] + [0.0] * 6}.items():
    rows[name] = loss, right, share = measured(bias)
    print(f"bias {name}: router loss {loss:.3f}, by the experts chosen {right:.3f}; the fullest has {100 * share:.0f} %")
(before, right_before, _), (after, right_after, share) = rows.values()
as_found = share == 1 and abs(after - before) < 1e-6 and abs(before - right_before) < 1e-3
sys.exit(0 if as_found and abs(right_after - after) > 0.005 else "changed since this was found")
EOF
