#!/usr/bin/env bash
# transformers 5.23.0: with TrainingArguments(label_smoothing_factor=…) above 0, Trainer computes the loss from the
# logits alone. The router loss, which the model adds where output_router_logits is set, is gone from what is trained,
# at however small a factor; no message, and the model still reports it. Right at 0. Hurts whoever counts on the router
# loss to keep the experts balanced and smooths labels besides.
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
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0,
    )
)
ids = torch.randint(64, (2, 16))
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: a factor of 1e-9 changes the loss by next to nothing, and the router loss is in both")
seen = {}
for factor in (0.0, 1e-9):
    arguments = TrainingArguments(sys.argv[1], label_smoothing_factor=factor, report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments)
    loss, outputs = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()}, return_outputs=True)
    model.zero_grad()
    loss.backward()
    router = model.model.layers[0].mlp.gate.weight.grad.norm()
    seen[factor] = loss.item(), outputs.aux_loss.item()
    print(f"factor {factor}: loss {loss:.4f}, router loss {outputs.aux_loss:.4f}, gradient of a router {router:.4f}")
lost = seen[0.0][0] - seen[1e-9][0]
sys.exit(0 if abs(lost - seen[1e-9][1]) < 1e-4 else "changed since this was found")
EOF
