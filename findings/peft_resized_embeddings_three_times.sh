#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: once tokens were added to the base, the file of an adapter that trains
# embed_tokens and lm_head (modules_to_save) holds each of them three times: as trained, again as trained, and as it was
# before; of trainable_token_indices, meant for a few rows, both matrices whole beside the rows. Its warning says that
# embeddings are saved. Right without new tokens: once, or the rows alone. Hurts whoever stores or uploads adapters:
# of Qwen3-30B-A3B it is 3.7 GB in place of 1.2, and 1.2 in place of some KB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
TOKENS, NEW, WIDTH = 512, 8, 32
torch.manual_seed(0)
Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )
).save_pretrained(base := f"{sys.argv[1]}/base")
WAYS = {
    "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": list(range(TOKENS - NEW, TOKENS))},
}
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: each matrix that trains, once; of trainable_token_indices its rows, and at most the matrices once")
copies, rows = {}, {}
for way, settings in WAYS.items():
    for resized in (False, True):
        model = AutoModelForCausalLM.from_pretrained(base)
        if resized:
            model.resize_token_embeddings(TOKENS + NEW)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], **settings))
        with torch.no_grad():  # stands for training
            for one in model.parameters():
                if one.requires_grad:
                    one.add_(1.0)
        path = f"{sys.argv[1]}/{way}-{resized}"
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            model.save_pretrained(path)
        said = [str(one.message) for one in raised if "embedding" in str(one.message)]
        stored = {name: one for name, one in load_file(f"{path}/adapter_model.safetensors").items()
                  if ".lora_" not in name}
        heads = [one for name, one in stored.items() if ".lm_head." in name]
        inputs = [one for name, one in stored.items() if ".embed_tokens." in name and len(one) > NEW]
        copies[way, resized] = len(inputs), len(heads)
        rows[way, resized] = sum(len(one) for one in stored.values())
        equal = sum(torch.equal(one, other) for i, one in enumerate(heads) for other in heads[:i])
        print(f"{way}, tokens added {resized}: {rows[way, resized]} rows of {WIDTH} in {len(stored)} tensors")
        print(f"  embed_tokens {len(inputs)} times, lm_head {len(heads)} times, {equal} equal; warnings {said}")
wanted = {
    ("modules_to_save", False): (1, 1), ("modules_to_save", True): (3, 3),
    ("trainable_token_indices", False): (0, 0), ("trainable_token_indices", True): (1, 1),
}
sys.exit(0 if copies == wanted else "changed since this was found")
EOF
