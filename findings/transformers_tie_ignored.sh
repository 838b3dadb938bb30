#!/usr/bin/env bash
# transformers 5.23.0: models of nemotron_h, kimi_linear and bailing_hybrid take `tie_word_embeddings: true` in their
# config, keep it and save it, but do not tie: the LM head is a tensor of its own, as if the config said false.
# Hurts whoever builds a small model of these types: a second table of the vocabulary, which nothing mentions, is made,
# trained and saved under a config that says there is one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home
"$folder/venv/bin/python" - <<'EOF'
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected of every type: config true, one table")
tied = {}
for kind in ("llama", "deepseek_v3", "nemotron_h", "kimi_linear", "bailing_hybrid"):
    config = AutoConfig.for_model(kind, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    tied[kind] = head is embeddings
    says = model.config.to_dict()["tie_word_embeddings"]
    tables = "one table" if tied[kind] else f"two tables of {tuple(head.shape)}, {head.numel():,} weights more"
    print(f"{type(model).__name__}: config {str(says).lower()}, {tables}")
as_found = tied["llama"] and tied["deepseek_v3"]
as_found = as_found and not any(tied[kind] for kind in ("nemotron_h", "kimi_linear", "bailing_hybrid"))
sys.exit(0 if as_found else "changed since this was found")
EOF
