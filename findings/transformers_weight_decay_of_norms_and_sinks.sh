#!/usr/bin/env bash
# transformers 5.23.0: Trainer leaves parameters out of weight decay by name: with “bias”, or “norm” as a word, in it. It
# decays vectors of other names: gpt-oss's sinks, A_log and D of layers with a recurrent state (Qwen3-Next, Granite 4,
# Nemotron 3), and Nemotron's last norm, norm_f. Right for Mixtral. Hurts full fine-tuning with decay: the norm is drawn
# to zero, and states forget at another pace; Mamba's authors mark A_log and D as not to be decayed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/out" <<'EOF'
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}
STATES = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}
KINDS = {
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32}
    | {f"linear_{name}": number for name, number in STATES.items()},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16}
    | {"num_local_experts": 4, "shared_intermediate_size": 32},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_routed_experts": 4},
}
ROWS = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: weight decay of matrices alone; no vector is among the parameters that it shrinks")
seen = {}
for kind, more in KINDS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | more)))
    arguments = TrainingArguments(sys.argv[1], weight_decay=0.1, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ROWS])
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    decayed = [names[id(weight)] for group in groups if group["weight_decay"] for weight in group["params"]]
    vectors = [name for name in decayed if model.get_parameter(name).ndim == 1]
    seen[kind] = {name.split("layers.")[-1].split(".", 1)[-1] for name in vectors}
    print(f"{kind}: {len(decayed)} decayed, among them vectors: {sorted(seen[kind]) or 'none'}")
as_found = seen == {
    "mixtral": set(),
    "gpt_oss": {"self_attn.sinks"},
    "qwen3_next": {"linear_attn.A_log"},
    "granitemoehybrid": {"mamba.A_log", "mamba.D"},
    "nemotron_h": {"mixer.A_log", "mixer.D", "norm_f.weight"},
}
sys.exit(0 if as_found else "changed since this was found")
EOF
