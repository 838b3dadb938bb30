#!/usr/bin/env bash
# peft 0.21.2: PiSSA by a fast decomposition (init_lora_weights "pissa_niter_16", which LLaMA-Factory sets by default)
# takes a random decomposition of each weight off the base. save_pretrained keeps the setting and no decomposition, and
# from_pretrained draws another, without a warning: what is loaded is not what was trained, and differs each time. Of
# LoRA-GA it takes nothing off. Right: "pissa", which is exact, and path_initial_model_for_weight_conversion. Hurts
# whoever loads or merges such an adapter. Here the weights are random, so that no decomposition is close to another.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraGAConfig
from peft.tuners.lora.loraga import preprocess_loraga
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
folder = sys.argv[1]
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
)).save_pretrained(f"{folder}/base")
ids = torch.randint(99, (2, 10))


def base():
    return LlamaForCausalLM.from_pretrained(f"{folder}/base").eval()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=ids).logits


print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: a loaded adapter computes what it computed when it was saved")
errors = {}
for start in ("pissa", "pissa_niter_16", "lora_ga"):
    model, options = base(), {"lora_ga_config": LoraGAConfig()} if start == "lora_ga" else {}
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=start, **options)
    if start == "lora_ga":
        preprocess_loraga(model, config, lambda: model(input_ids=ids, labels=ids).loss.backward())
    adapted = get_peft_model(model, config)
    with torch.no_grad():  # as training does
        for name, factor in adapted.named_parameters():
            if "lora_B" in name:
                factor.add_(torch.randn_like(factor) * 0.05)
    trained, change = logits(adapted), (logits(adapted) - logits(base())).norm()
    adapted.save_pretrained(f"{folder}/adapter")
    loaded = [logits(PeftModel.from_pretrained(base(), f"{folder}/adapter")) for _ in range(2)]
    errors[start] = [((one - trained).norm() / change).item() for one in loaded]
    print(f"{start}: loaded twice, off by {errors[start][0]:.3f} and {errors[start][1]:.3f} of what training changed")
once, again = errors["pissa_niter_16"]
as_found = max(errors["pissa"]) < 1e-4 and min(once, again, *errors["lora_ga"]) > 0.05 and once != again
sys.exit(0 if as_found else "changed since this was found")
EOF
