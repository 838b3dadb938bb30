#!/usr/bin/env bash
# transformers 5.23.0: total_flos, which Trainer logs and keeps in trainer_state.json, is 6 x tokens x parameters, with
# all experts in it: it is the same whether a token is sent to one of eight experts or to all. Of Mixtral-8x7B it is 3.6
# times, of Qwen3-30B-A3B nine times what is computed. Right for dense models. Hurts whoever compares what trainings
# cost, or tells the share of a GPU's peak, by it.
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
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ROWS = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: total_flos as large as what is computed, which grows with the number of experts a token is sent to")
told, times = {}, {}
for name, config in {
    "dense": LlamaConfig(**SIZES),
    "1 of 8 experts": MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=1),
    "8 of 8 experts": MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=8),
}.items():
    model = AutoModelForCausalLM.from_config(config)
    if name != "dense":
        model.set_experts_implementation("eager")  # the others' products are not in torch's counter
    with FlopCounterMode(display=False) as counter:
        model(ROWS, labels=ROWS).loss.backward()
    arguments = TrainingArguments(
        sys.argv[1], max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ROWS])
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    told[name] = trainer.state.total_flos
    times[name] = told[name] / counter.get_total_flops()
    print(f"{name}: total_flos {told[name]:,.0f}, computed {counter.get_total_flops():,}, {times[name]:.2f} times")
as_found = told["1 of 8 experts"] == told["8 of 8 experts"] and times["1 of 8 experts"] > 3
as_found = as_found and 0.8 < times["dense"] < 1.2 and 0.8 < times["8 of 8 experts"] < 1.2
sys.exit(0 if as_found else "changed since this was found")
EOF
