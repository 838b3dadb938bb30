#!/usr/bin/env bash
# mergekit 0.1.5: mergekit-extract-lora writes the difference of two models as a LoRA, and what it cannot decompose as a
# whole tensor (norms, Qwen3-MoE's router), so that base and adapter give the fine-tuned model. Fused experts of
# transformers 5 are modules without a `weight`, which it passes over: the adapter has nothing of them, and nothing is
# said. Hurts whoever keeps a fine-tuned mixture as an adapter: what its experts learned is gone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  torch==2.13.0 transformers==5.23.0 mergekit==0.1.5 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import copy
import importlib.metadata
import logging
import sys

import huggingface_hub
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

huggingface_hub.repo_exists = lambda *_, **__: False  # the model card's only question to the network
from mergekit.scripts import extract_lora  # noqa: E402 (after the line above)

transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("mergekit", importlib.metadata.version("mergekit"))
print("expected: the base with the adapter is the fine-tuned model, or a warning names what is not")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
config = Qwen3MoeConfig(**sizes, num_hidden_layers=1, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
base = AutoModelForCausalLM.from_config(config)
tuned = copy.deepcopy(base)
with torch.no_grad():
    for parameter in tuned.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
base.save_pretrained(f"{sys.argv[1]}/base")
tuned.save_pretrained(f"{sys.argv[1]}/tuned")

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)
options = ["--base-model", f"{sys.argv[1]}/base", "--model", f"{sys.argv[1]}/tuned", "--max-rank", "64"]
extract_lora.main([*options, "--out-path", f"{sys.argv[1]}/adapter"], standalone_mode=False)
print("said of experts:", [line for line in said if "expert" in line])

merged = peft.PeftModel.from_pretrained(copy.deepcopy(base), f"{sys.argv[1]}/adapter").merge_and_unload()
missing = {}
for name, parameter in merged.named_parameters():
    difference = tuned.get_parameter(name) - base.get_parameter(name)
    missing[name] = ((tuned.get_parameter(name) - parameter).norm() / difference.norm()).item()
    print(f"{missing[name]:.0%} of what training changed is missing in {name}")
experts = {name for name in missing if "experts" in name}
as_found = len(experts) == 2 and not any("expert" in line for line in said)
as_found = as_found and all(missing[name] == 1 if name in experts else missing[name] < 0.01 for name in missing)
sys.exit(0 if as_found else "changed since this was found")
EOF
