#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: hotswap_adapter puts an adapter of a lower rank into the first rows of the old
# one. For fused experts, whose rows are expert after expert, that gives experts the factors of others, and the last
# ones none. No warning. Right for attention, and for experts where the rank stays or grows. Hurts whoever serves a
# mixture and swaps its adapters: the swapped one computes something else than the same one loaded afresh.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder" <<'EOF'
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import MixtralConfig, MixtralForCausalLM

transformers.logging.set_verbosity_error()
CONFIG = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4,
)
PARTS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}
IDS = torch.arange(40)[None]


def base():
    torch.manual_seed(0)
    return MixtralForCausalLM(CONFIG).eval()


def saved(part, rank, seed):
    """Write an adapter of some rank, and return its folder."""
    model = base()
    torch.manual_seed(seed)
    settings = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, **PARTS[part])
    path = Path(sys.argv[1]) / f"{part}-{rank}-{seed}"
    get_peft_model(model, settings).save_pretrained(path)
    return path


print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
print("expected: an adapter that was swapped in computes what it computes when it is loaded")
as_found = True
for part, old, new, right in (
    ("attention", 4, 8, True), ("attention", 8, 4, True),
    ("experts", 8, 8, True), ("experts", 4, 8, True), ("experts", 8, 4, False), ("experts", 8, 2, False),
):
    model = PeftModel.from_pretrained(base(), saved(part, old, 1)).eval()
    with warnings.catch_warnings(record=True) as raised, torch.no_grad():
        warnings.simplefilter("always")
        before = model(IDS).logits
        hotswap_adapter(model, saved(part, new, 2), "default")
        swapped = model(IDS).logits
        loaded = PeftModel.from_pretrained(base(), saved(part, new, 2)).eval()(IDS).logits
    said = [str(warning.message) for warning in raised if issubclass(warning.category, (UserWarning, RuntimeWarning))]
    wrong, apart = (swapped - loaded).abs().max().item(), (before - loaded).abs().max().item()
    print(f"{part}, rank {old} to {new}: logits differ by {wrong:.1e} (the two adapters by {apart:.1e}); warned: {said}")
    as_found &= (wrong < 1e-5) is right and apart > 0.01 and not said
sys.exit(0 if as_found else "changed since this was found")
EOF
