#!/usr/bin/env bash
# optimum-quanto 0.2.7 with transformers 5.24.0: a mixture that QuantizedModelForCausalLM wrote comes back from its
# from_pretrained with experts of memory as it was found, of Mixtral with such routers too. save_pretrained of
# transformers writes each expert under the name of before, quanto reads names as they are and takes what is missing
# for granted. No warning. Right for a dense model and for gpt-oss, whose experts are stored as they are computed.
# Hurts whoever keeps a quantized mixture.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 optimum-quanto==0.2.7 accelerate==1.15.0 \
    numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
import warnings
from importlib.metadata import version

import torch
import transformers
from optimum.quanto import QuantizedModelForCausalLM, qint8
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16,
}
TYPES = {
    "qwen3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
ids = torch.arange(1, 33)[None]
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "optimum-quanto")))
print("expected: what was quantized, saved and read computes what it did before, or an error")
others, said = {}, []
for kind, sizes in TYPES.items():
    with torch.no_grad(), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes)).eval()
        quantized = QuantizedModelForCausalLM.quantize(model, weights=qint8, exclude="lm_head")
        before = quantized(ids).logits
        quantized.save_pretrained(path := f"{sys.argv[1]}/{kind}")
        back = QuantizedModelForCausalLM.from_pretrained(path)
        read = {name: one.float() for name, one in back.named_parameters()}
        same = torch.equal(back(ids).logits, before)
        others[kind] = [name.removeprefix("model.layers.0.") for name, one in quantized.named_parameters()
                        if not torch.equal(one.float(), read[name])]
    said += [str(one.message) for one in raised if "xpert" in str(one.message) or "issing" in str(one.message)]
    print(f"{kind}: logits as before saving: {same}; tensors with other values: {others[kind]}")
print("warnings about it:", said)
experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
wanted = {"qwen3": [], "gpt_oss": [], "qwen3_moe": experts, "mixtral": ["mlp.gate.weight", *experts]}
sys.exit(0 if others == wanted and not said else "changed since this was found")
EOF
