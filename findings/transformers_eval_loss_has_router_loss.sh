#!/usr/bin/env bash
# transformers 5.23.0: with output_router_logits the eval_loss of Trainer is the token loss plus the router loss times its
# coefficient, although that is a term of training alone: exp(eval_loss) is no perplexity, it falls when routing evens
# out, and load_best_model_at_end chooses by it. A dense model, or the same one without the router loss, is not compared
# by the same number. Hurts whoever compares runs or models by eval_loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (8, 16)).tolist()]
COEFFICIENT = 0.1
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: eval_loss is the mean loss of a token, whatever is added to it in training")


def losses(with_router_loss: bool) -> tuple[float, float]:
    """Return eval_loss, and the mean cross-entropy of the same rows' tokens, of the same weights."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=with_router_loss,
        router_aux_loss_coef=COEFFICIENT,
    )
    model = MixtralForCausalLM(config).eval()
    arguments = TrainingArguments(sys.argv[1], report_to=[], use_cpu=True, disable_tqdm=True)
    evaluated = Trainer(model, arguments, eval_dataset=ROWS).evaluate()["eval_loss"]
    ids = torch.tensor([row["input_ids"] for row in ROWS])
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    return evaluated, torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


as_found = True
for with_router_loss in (False, True):
    evaluated, tokens = losses(with_router_loss)
    print(f"output_router_logits {with_router_loss}: eval_loss {evaluated:.4f}, mean of tokens {tokens:.4f}")
    added = evaluated - tokens
    # balanced routing to two experts has a router loss of 2
    as_found = as_found and (1.5 < added / COEFFICIENT < 4 if with_router_loss else abs(added) < 1e-4)
sys.exit(0 if as_found else "changed since this was found")
EOF
