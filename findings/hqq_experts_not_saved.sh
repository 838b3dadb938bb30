#!/usr/bin/env bash
# hqq 0.2.8.post1 with transformers 5.24.0: AutoHQQHFModel.save_quantized keeps what lies in modules without children.
# Experts of a mixture are one module with weights of its own and an activation in it: neither quantized nor saved.
# from_quantized opens the folder without an error and leaves them on the meta device; in bfloat16 the model then
# computes with memory as it was found. Right for a dense model, which comes back to the bit. Hurts whoever quantizes a
# mixture, saves it and deletes the original.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 hqq==0.2.8.post1 accelerate==1.15.0 \
    numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF' 2> >(grep -v "warn\|%|" >&2)
import sys
import warnings
from importlib.metadata import version

import torch
import transformers
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16,
}
TYPES = {"qwen3": {}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}}
ids = torch.arange(1, 33)[None]
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "hqq")))
print("expected: what was quantized, saved and opened computes what it did before, or an error")
seen = {}
for kind, sizes in TYPES.items():
    with torch.no_grad(), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes), dtype=torch.bfloat16)
        AutoHQQHFModel.quantize_model(
            model.eval(), quant_config=BaseQuantizeConfig(nbits=8, group_size=64), compute_dtype=torch.bfloat16,
            device="cpu",
        )
        before = model(ids).logits
        AutoHQQHFModel.save_quantized(model, path := f"{sys.argv[1]}/{kind}")
        opened = AutoHQQHFModel.from_quantized(path, compute_dtype=torch.bfloat16, device="cpu").eval()
        same = torch.equal(opened(ids).logits, before)
    linear = sum(isinstance(module, HQQLinear) for module in model.modules())
    fused = [name for name, _ in model.named_parameters() if ".experts." in name]
    stored = [name for name in torch.load(f"{path}/qmodel.pt", weights_only=False) if "experts" in name]
    empty = [name for name, parameter in opened.named_parameters() if parameter.is_meta]
    said = [str(one.message) for one in raised if "expert" in str(one.message) or "meta" in str(one.message)]
    seen[kind] = same, stored, empty == fused, said
    print(f"{kind}: {linear} layers quantized, {len(fused)} tensors of experts in {model.dtype}")
    print(f"  experts in the file: {stored}; on the meta device once opened: {empty}; warnings about it: {said}")
    print(f"  logits as before saving: {same}")
wanted = {"qwen3": (True, [], True, []), "qwen3_moe": (False, [], True, [])}
sys.exit(0 if seen == wanted and fused else "changed since this was found")
EOF
