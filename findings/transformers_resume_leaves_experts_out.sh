#!/usr/bin/env bash
# transformers 5.23.0: Trainer saves a mixture of experts under the names of the hub (an entry an expert) and, on resume
# and for load_best_model_at_end, reads them back without translating: experts and routers stay what the model had
# before. A warning lists missing keys; training goes on, with the optimizer's states of the lost weights. Right for
# dense models, and for from_pretrained of the same folder. Hurts whoever resumes: the experts are the base's again.
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
from transformers import (
    AutoModelForCausalLM, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig, Trainer, TrainingArguments,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(0))


def trained(model, out, resume=None):
    """Train for two steps; with `resume`, the checkpoint after them, no step is left."""
    arguments = TrainingArguments(
        out, max_steps=2, save_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    return model.state_dict()


print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: resuming from the last checkpoint of a run gives the weights that the run ended with")
differ = {}
for config in (
    LlamaConfig(**SIZES),
    MixtralConfig(**SIZES, num_local_experts=4),
    Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
):
    out = Path(sys.argv[1]) / config.model_type
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(out / "base")
    ended = trained(AutoModelForCausalLM.from_pretrained(out / "base"), out / "run")
    last = out / "run/checkpoint-2"
    resumed = trained(AutoModelForCausalLM.from_pretrained(out / "base"), out / "again", last)
    opened = AutoModelForCausalLM.from_pretrained(last).state_dict()
    wrong, wrong_opened = (
        [name for name, weight in weights.items() if not torch.equal(weight, ended[name])]
        for weights in (resumed, opened)
    )
    differ[config.model_type] = wrong
    print(f"{config.model_type}: {len(wrong)} of {len(ended)} weights differ after resuming: {wrong}; "
          f"{len(wrong_opened)} by from_pretrained")
    if wrong_opened:
        sys.exit("changed since this was found")
as_found = not differ["llama"] and all(
    any("experts.gate_up_proj" in name for name in lost) for kind, lost in differ.items() if kind != "llama"
)
sys.exit(0 if as_found else "changed since this was found")
EOF
