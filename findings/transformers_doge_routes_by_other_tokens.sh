#!/usr/bin/env bash
# transformers 5.23.0: in a whole sequence, Doge's mixture chooses a token's experts by the router's numbers for two
# other tokens, one of them later in the row or in another row (only a comment in its code says so). So a loss counts
# predictions that know what follows, rows of a batch change each other, and what is generated token by token is
# another model. Right with is_moe=False. Hurts whoever fine-tunes Doge's mixtures: the loss is not that of their use.
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
from transformers import DogeConfig, DogeForCausalLM

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4, "max_position_embeddings": 64,
}
IDS = torch.randint(3, 60, (2, 10), generator=torch.Generator().manual_seed(0))
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: logits of a token depend on the tokens of its row up to it, and on nothing else")
as_found = True
for is_moe in (False, True):
    torch.manual_seed(0)
    model = DogeForCausalLM(DogeConfig(**SIZES, is_moe=is_moe, initializer_range=0.2)).eval()
    for name, parameter in model.named_parameters():
        if "_embed." in name:  # the experts
            torch.nn.init.normal_(parameter, std=0.3)
    row, later = IDS[:1], IDS[:1].clone()
    later[0, -1] = 61
    with torch.no_grad():
        alone = model(row).logits[0]
        beside = model(IDS).logits[0]
        before_change = model(later).logits[0]
        past = model(row[:, :-1]).past_key_values
        stepwise = model(row[:, -1:], past_key_values=past).logits[0, -1]
        loss, labels = model(row, labels=row).loss, row[0, 1:]
        predicted = torch.stack([model(row[:, :end]).logits[0, -1] for end in range(1, row.shape[1])])
        of_use = torch.nn.functional.cross_entropy(predicted, labels)
    changes = {
        "another last token": (before_change[:-1] - alone[:-1]).abs().max().item(),
        "another row beside it": (beside - alone).abs().max().item(),
        "the last token from the cache": (stepwise - alone[-1]).abs().max().item(),
        "its loss against that of growing prefixes": abs(loss - of_use).item(),
    }
    print(f"is_moe {is_moe}: logits change by: " + ", ".join(f"{name} {value:.1e}" for name, value in changes.items()))
    as_found &= all((value > 1e-3) is is_moe for value in changes.values())
sys.exit(0 if as_found else "changed since this was found")
EOF
