#!/usr/bin/env bash
# transformers 5.23.0: under gradient checkpointing with use_reentrant=True the router loss is computed, added, logged
# as ever, and has no gradient: router logits are recorded within layers, which it first runs without one.
# Routers train by the other loss alone. No warning. Right with use_reentrant=False, the default of today. Hurts whoever
# still sets True, and TRL with PEFT under ZeRO-3, which sets it: nothing balances the experts, and the log looks right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/out" <<'EOF'
import contextlib
import io
import sys

import torch
import transformers
from transformers import (
    AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig, Trainer, TrainerCallback, TrainingArguments,
)

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 10.0,
}
CONFIGS = (
    MixtralConfig(**SIZES, num_local_experts=4),
    Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8),
    OlmoeConfig(**SIZES, num_experts=4),
)
ROWS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))


class Gradients(TrainerCallback):
    """Keeps the norm of the routers' gradients."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        of_routers = [weight.grad.norm() for name, weight in model.named_parameters() if "gate.weight" in name]
        self.norm = torch.stack(of_routers).norm().item()


print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: checkpointing changes memory and time, not the loss and the gradients of routers")
as_found = True
for config in CONFIGS:
    losses, norms = [], []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        arguments = TrainingArguments(
            sys.argv[1], max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", max_grad_norm=0, gradient_checkpointing=reentrant is not None,
            gradient_checkpointing_kwargs=None if reentrant is None else {"use_reentrant": reentrant},
        )
        rows = [{"input_ids": row, "labels": row} for row in ROWS]
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[gradients := Gradients()])
        with contextlib.redirect_stdout(io.StringIO()):
            losses.append(trainer.train().training_loss)
        norms.append(gradients.norm)
        how = "no checkpointing" if reentrant is None else f"use_reentrant={reentrant}"
        print(f"{config.model_type}, {how}: loss {losses[-1]:.4f}, gradient of routers {norms[-1]:.4f}")
    same_loss = max(losses) - min(losses) < 1e-4
    as_found = as_found and same_loss and abs(norms[1] / norms[0] - 1) < 1e-3 and norms[2] < norms[0] / 20
sys.exit(0 if as_found else "changed since this was found")
EOF
