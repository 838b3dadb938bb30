#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0 and bitsandbytes 0.50.2: prepare_model_for_kbit_training, the step that guides of
# QLoRA put after load_in_4bit, turns all that is not packed in 4 bits into float32, frozen weights too. Of a mixture of
# experts that is nearly everything, because experts stay in 16 bits: Mixtral-8x7B goes from 91 GB to 182 GB. A dense
# model is right: there it is norms and embeddings. Hurts whoever follows the guide, by an out-of-memory error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 bitsandbytes==0.50.2 \
    accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
from pathlib import Path

import bitsandbytes
import peft
import torch
import transformers
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, MixtralConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {
    "vocab_size": 32, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__,
      "bitsandbytes", bitsandbytes.__version__)
print("expected: the frozen weights of a model take about as many bytes after it is prepared as before")
grows = {}
for config in (LlamaConfig(**SIZES), MixtralConfig(**SIZES, num_local_experts=8)):
    saved = Path(sys.argv[1]) / config.model_type
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(saved)
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(saved, quantization_config=packed, dtype=torch.bfloat16)
    before = sum(weight.nbytes for weight in model.parameters())
    model = prepare_model_for_kbit_training(model)
    after = sum(weight.nbytes for weight in model.parameters())
    grows[config.model_type] = after / before
    largest = max(model.named_parameters(), key=lambda named: named[1].nbytes)
    print(f"{config.model_type}: {before:,} bytes, then {after:,}; the largest: {largest[0]}, {largest[1].dtype}")
as_found = grows["llama"] < 1.1 and grows["mixtral"] > 1.8
sys.exit(0 if as_found else "changed since this was found")
EOF
