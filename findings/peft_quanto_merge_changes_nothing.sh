#!/usr/bin/env bash
# peft 0.21.2 with optimum-quanto 0.2.7: merge_and_unload of LoRA on a model that QuantoConfig quantized gives the
# base back, as if nothing was trained, and merge_adapter switches the adapter off: PEFT writes to weight.data, which
# quanto's tensors do not store. PiSSA subtracts its part from the weights in vain likewise, so the model is another
# before the first step. No warning. Right for the same model in float32. Hurts whoever trains a quantized model and
# saves or serves the merged one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 \
    optimum-quanto==0.2.7 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/base" <<'EOF'
import sys
import warnings
from importlib.metadata import version

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, QuantoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.manual_seed(0)
Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )
).save_pretrained(sys.argv[1])
ids = torch.arange(1, 33)[None]


def read(quantized):
    settings = {"quantization_config": QuantoConfig(weights="int8")} if quantized else {}
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **settings).eval()


@torch.no_grad()
def distance(one, two):
    return (one - two).abs().max().item()


print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "optimum-quanto")))
print("expected: a merged model computes what the adapted one did, or an error; PiSSA starts at the base's logits")
far = {}
for quantized in (False, True):
    with torch.no_grad(), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        base = read(quantized)(ids).logits
        torch.manual_seed(1)  # random factors in both matrices stand for trained ones
        adapted = get_peft_model(read(quantized), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        adapted.eval()
        learned = adapted(ids).logits
        adapted.merge_adapter()
        switched = adapted(ids).logits
        adapted.unmerge_adapter()
        merged = adapted.merge_and_unload(safe_merge=True)(ids).logits
        pissa = get_peft_model(read(quantized), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa"))
        begun = pissa.eval()(ids).logits
    said = [str(one.message) for one in raised if "merge" in str(one.message) or "uant" in str(one.message)]
    kind = "quanto int8" if quantized else "float32"
    print(f"{kind}: the adapter changes logits by {distance(learned, base):.4f}")
    for name, one, other in (
        ("merge_adapter from adapted", switched, learned), ("merge_and_unload from adapted", merged, learned),
        ("merge_and_unload from base", merged, base), ("PiSSA before training from base", begun, base),
    ):
        far[quantized, name] = distance(one, other)
        print(f"  {name}: {far[quantized, name]:.4f}")
    print(f"  warnings: {said}")
from_adapted = [far[True, name] > 0.05 for name in ("merge_adapter from adapted", "merge_and_unload from adapted")]
lost = all(from_adapted) and far[True, "merge_and_unload from base"] == 0.0 and not said
doubled = far[True, "PiSSA before training from base"] > 0.05
right = far[False, "merge_and_unload from adapted"] < 1e-4 and far[False, "PiSSA before training from base"] < 1e-3
sys.exit(0 if lost and doubled and right else "changed since this was found")
EOF
