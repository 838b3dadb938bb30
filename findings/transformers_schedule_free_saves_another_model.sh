#!/usr/bin/env bash
# transformers 5.23.0, schedulefree 1.4.1: a schedule-free optimizer has two sets of weights: those at which it takes
# gradients, and their average, the trained model. Trainer turns to the average for an evaluation, and not for a save:
# checkpoints and save_model() hold the average only where an evaluation came just before, else the other weights, whose
# loss nobody measured. Nothing is said; other optimizers save what they evaluate. Hurts whoever trains by
# `optim="schedule_free_adamw"` and evaluates never, or at other steps than those at which it saves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  torch==2.13.0 transformers==5.23.0 schedulefree==1.4.1 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import importlib.metadata
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, MixtralConfig, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
print("schedulefree", importlib.metadata.version("schedulefree"))
print("expected: what is saved has the loss that an evaluation at the same step gives")
sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
config = MixtralConfig(**sizes, num_hidden_layers=1, intermediate_size=32, num_local_experts=4)
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
same = {}
for optimizer in ("adamw_torch", "schedule_free_adamw"):
    for evaluation in ("no", "steps"):
        torch.manual_seed(0)
        output = f"{sys.argv[1]}/{optimizer}-{evaluation}"
        settings = {"learning_rate": 5e-3, "lr_scheduler_type": "constant", "max_steps": 40, "use_cpu": True}
        saving = {"save_steps": 40, "eval_strategy": evaluation, "eval_steps": 40, "report_to": []}
        quiet = {"disable_tqdm": True, "logging_strategy": "no"}
        arguments = TrainingArguments(output, optim=optimizer, **settings, **saving, **quiet)
        trainer = Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.save_model(f"{output}/end")
        losses = {"evaluate()": trainer.evaluate()["eval_loss"]}
        for saved in ("checkpoint-40", "end"):
            other = Trainer(AutoModelForCausalLM.from_pretrained(f"{output}/{saved}"), arguments, eval_dataset=rows)
            losses[saved] = other.evaluate()["eval_loss"]
        same[optimizer, evaluation] = max(losses.values()) - min(losses.values()) < 1e-3
        print(f"{optimizer}, evaluations: {evaluation}", {name: round(loss, 3) for name, loss in losses.items()})
as_found = [case for case, is_same in same.items() if not is_same] == [("schedule_free_adamw", "no")]
sys.exit(0 if as_found else "changed since this was found")
EOF
