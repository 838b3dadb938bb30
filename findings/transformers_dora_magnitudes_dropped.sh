#!/usr/bin/env bash
# transformers 5.24.0 with peft 0.21.2: `load_adapter`, and `from_pretrained` of an adapter's folder, which calls it, do
# not read what DoRA trained beside LoRA's factors: PEFT writes `lora_magnitude_vector`, transformers looks for
# `lora_magnitude_vector.weight` and computes the magnitudes anew from the weights. A table among the log's lines says
# that they were unexpected and missing, and "can be ignored". Right with PeftModel, and for LoRA, OFT, LoKr and IA3.
# Hurts whoever trained with `use_dora` and opens the adapter by transformers alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys

import peft
import torch
import transformers
from peft import IA3Config, LoKrConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
KINDS = {
    "DoRA": LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=True),
    "LoRA": LoraConfig(target_modules=["q_proj", "v_proj"]),
    "OFT": OFTConfig(target_modules=["q_proj"], oft_block_size=16),
    "LoKr": LoKrConfig(target_modules=["q_proj"]),
    "IA3": IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
}
torch.manual_seed(0)
AutoModelForCausalLM.from_config(Qwen3MoeConfig(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64, num_hidden_layers=2,
    moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
)).save_pretrained("base")
row = torch.arange(2, 34)[None]
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: the model that was trained, by whichever way its adapter is opened")
lost = set()
with torch.no_grad():
    for kind, settings in KINDS.items():
        trained = get_peft_model(AutoModelForCausalLM.from_pretrained("base"), settings).eval()
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        trained.save_pretrained(kind)
        by_transformers = AutoModelForCausalLM.from_pretrained("base")
        info = by_transformers.load_adapter(kind)
        opened = {
            "PeftModel": PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), kind).eval(),
            "load_adapter": by_transformers.eval(),
            "from_pretrained of the adapter": AutoModelForCausalLM.from_pretrained(kind).eval(),
        }
        off = {how: (model(row).logits - trained(row).logits).abs().max().item() for how, model in opened.items()}
        print(f"{kind}: logits differ by " + ", ".join(f"{value:.1e} ({how})" for how, value in off.items()))
        print(f"  not read: {sorted(info.unexpected_keys)[:1] or 'nothing'}")
        lost |= {(kind, how) for how, value in off.items() if value > 1e-4}
as_found = lost == {("DoRA", "load_adapter"), ("DoRA", "from_pretrained of the adapter")}
sys.exit(0 if as_found else "changed since this was found")
EOF
