#!/usr/bin/env bash
# transformers 5.23.0: its Trainer divides the token loss by the tokens of all micro-batches, so that accumulation does
# not change it, but adds the router loss of each micro-batch whole: with gradient_accumulation_steps=8 the router loss
# weighs 8 times as much as router_aux_loss_coef says. The same eight rows, in one batch or in eight, give other gradients.
# Hurts whoever accumulates, as one does on a small card: the coefficient of a recipe is not what is trained with.
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
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments

transformers.logging.set_verbosity_error()
ROW = {"input_ids": list(range(16)), "labels": list(range(16))}


class Gradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.value = model.model.layers[0].mlp.gate.weight.grad.clone()


def gradient(micro_batches: int, coefficient: float) -> torch.Tensor:
    """Train a step on eight equal rows, and return the gradient of the first layer's router."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=coefficient,
    )
    arguments = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=8 // micro_batches, gradient_accumulation_steps=micro_batches,
        max_steps=1, max_grad_norm=0.0, learning_rate=0.0, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    seen = Gradient()
    Trainer(MixtralForCausalLM(config), arguments, train_dataset=[ROW] * 8, callbacks=[seen]).train()
    return seen.value


print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: the router's gradient is the same for eight equal rows in 1, 2 or 8 micro-batches")
ratios = {}
for coefficient in (0.0, 1.0):
    whole = gradient(1, coefficient)
    ratios[coefficient] = [(gradient(count, coefficient).norm() / whole.norm()).item() for count in (1, 2, 8)]
    print(f"router_aux_loss_coef {coefficient}: {[round(ratio, 2) for ratio in ratios[coefficient]]} times")
without, with_ = ratios.values()
as_found = max(abs(ratio - 1) for ratio in without) < 0.01 and 1.9 < with_[1] < 2.1 and 7 < with_[2] < 9
sys.exit(0 if as_found else "changed since this was found")
EOF
