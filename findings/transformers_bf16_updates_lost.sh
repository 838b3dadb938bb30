#!/usr/bin/env bash
# transformers 5.23.0: from_pretrained loads a model in the dtype it was saved in, mostly bf16, and Trainer's bf16=True,
# documented as mixed precision, trains these weights as they are: no float32 copies, in which small updates add up. At
# a learning rate of 1e-5 most weights, and all norms, stay bit for bit what they were. No warning. Right with
# dtype=torch.float32. Hurts full fine-tuning at usual rates: what cannot move is not seen in the loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import contextlib
import io
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, MixtralConfig, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CONFIG = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4,
)
ROWS = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(path := Path(sys.argv[1]) / "saved")
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: 20 steps with bf16=True, a learning rate of 1e-5 and no decay move all weights that have gradients")
stayed = {}
for name, options in (("as saved", {}), ("dtype=torch.float32", {"dtype": torch.float32})):
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    arguments = TrainingArguments(
        sys.argv[1], max_steps=20, per_device_train_batch_size=8, learning_rate=1e-5, lr_scheduler_type="constant",
        bf16=True, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ROWS])
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    share = {name: (weight == before[name]).float().mean().item() for name, weight in model.named_parameters()}
    stayed[name] = [
        sum(shares := [value for part, value in share.items() if kind in part]) / len(shares)
        for kind in ("norm", "experts", "mlp.gate")
    ]
    states = {state["exp_avg"].dtype for state in trainer.optimizer.state.values()} | {model.dtype}
    norms, experts, routers = stayed[name]
    print(f"{name}: weights and moments {states}; "
          f"stayed as they were: {norms:.0%} of norms, {experts:.0%} of experts, {routers:.0%} of routers")
norms, experts, routers = stayed["as saved"]
as_found = norms == 1 and experts > 0.5 and routers > 0.5 and max(stayed["dtype=torch.float32"]) < 0.02
sys.exit(0 if as_found else "changed since this was found")
EOF
