#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.24.0: `generate` loses what prefix tuning learned, and shows the virtual tokens of prompt
# tuning and of p-tuning to the first new token only. transformers renamed the cache of keys and values from
# `past_key_values` to `cache`, and PEFT looks under the old name. A forward pass without a cache is right, so training
# is, and evaluation by loss; what is generated is another model's. Right with transformers 5.23.0. Hurts whoever
# generates with such an adapter, or compares it with LoRA by what it answers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/generate.py" <<'EOF'
import json
import sys
from importlib.metadata import version

import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.3}
ASKED = torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(0))
NEW = 8
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")))
equal = []
for config in (PrefixTuningConfig, PromptTuningConfig, PromptEncoderConfig):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model = get_peft_model(base, config(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    rows = ASKED
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()  # as if trained
        for _ in range(NEW):  # the most probable token of a pass over all tokens, again and again
            logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
            rows = torch.cat([rows, logits[:, -1:].argmax(-1)], 1)
        asked = {"attention_mask": torch.ones_like(ASKED), "max_new_tokens": NEW, "do_sample": False}
        generated = model.generate(input_ids=ASKED, **asked)[0, 6:].tolist()
        with model.disable_adapter():
            without = model.base_model.generate(input_ids=ASKED, **asked)[0, 6:].tolist()
    print(f"{config.__name__}: expected {rows[0, 6:].tolist()}, generated {generated}, without it {without}")
    equal.append([generated == rows[0, 6:].tolist(), generated == without])
sys.exit(0 if equal == json.loads(sys.argv[1]) else "changed since this was found")
EOF
run() {  # version of transformers; for each method: are the tokens those expected, those of the model without it
  python3.11 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet torch==2.13.0 "transformers==$1" peft==0.21.2 numpy==2.3.5
  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$folder/$1/bin/python" "$folder/generate.py" "$2" 2>"$folder/log" ||
    { tail -n 15 "$folder/log" >&2; exit 1; }
}
run 5.23.0 '[[true, false], [true, false], [true, false]]'
run 5.24.0 '[[false, true], [false, false], [false, false]]'
