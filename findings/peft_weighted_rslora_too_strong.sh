#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter gives what it made alpha = rank, so that its scale is 1, as the scales of the parts
# are in its factors already. Of adapters with use_rslora the scale is alpha / sqrt(rank): what was made is sqrt(rank)
# times too strong, twice at rank 4 and 8 times at rank 64, even of one adapter with weight 1. By "linear", "cat",
# "svd" and what follows from them; also once it is saved and opened. No warning. Right without use_rslora. Hurts
# whoever mixes adapters.
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
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM

RANK = 4


def base():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4,
    )
    return MixtralForCausalLM(config)


def change(model, name):
    return model.base_model.model.model.layers[0].self_attn.q_proj.get_delta_weight(name)


def strength(got, wanted):
    return ((got * wanted).sum() / (wanted * wanted).sum()).item()


print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: 1.00 everywhere: the change of weights is that of the adapters, added")
seen, said = {}, []
for rslora in (False, True):
    config = LoraConfig(
        r=RANK, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, use_rslora=rslora
    )  # random factors in both matrices stand for trained ones
    with torch.no_grad(), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        model = get_peft_model(base(), config, adapter_name="one")
        model.add_adapter("two", config)
        model.add_weighted_adapter(["one"], [1.0], "same")
        both = change(model, "one") + change(model, "two")
        made = {"linear, one adapter": strength(change(model, "same"), change(model, "one"))}
        for way, settings in (("cat", {}), ("svd", {"svd_rank": 2 * RANK})):
            model.add_weighted_adapter(["one", "two"], [1.0, 1.0], way, combination_type=way, **settings)
            made[f"{way}, two adapters"] = strength(change(model, way), both)
        path = f"{sys.argv[1]}/{rslora}"
        model.save_pretrained(path, selected_adapters=["same"])
        opened = PeftModel.from_pretrained(base(), f"{path}/same", adapter_name="same")
        made["linear, saved and opened"] = strength(change(opened, "same"), change(model, "one"))
    seen[rslora] = [round(value, 2) for value in made.values()]
    said += [str(one.message) for one in raised if "rslora" in str(one.message) or "scal" in str(one.message)]
    print(f"use_rslora {rslora}:", {way: f"{value:.2f}" for way, value in made.items()})
print("warnings about scales:", said)
cat = round((2 * RANK) ** 0.5, 2)  # of rank 8
wanted = {False: [1.0] * 4, True: [2.0, cat, cat, 2.0]}
sys.exit(0 if seen == wanted and not said else "changed since this was found")
EOF
