#!/usr/bin/env bash
# transformers 5.23.0: DeepSeek-V3, GLM-4.5 and most others keep e_score_correction_bias in float32 when a model is
# loaded in bfloat16, because it decides which experts a token gets; MiniMax-M2 and M3, Kimi Linear, Laguna, Step 3.7
# and LongCat do not. Biases are alike, and large beside the differences of scores that decide: near 8, bfloat16 has
# steps of 1/16. No warning. Hurts whoever trains or serves these in 16 bits: tokens get other experts (of a model with
# random weights, whose scores are near one another, nearly all).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/model" <<'EOF'
import importlib
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, DeepseekV3Config, MiniMaxM2Config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, num_experts_per_tok=4,
)
MODELS = {
    "DeepSeek-V3": DeepseekV3Config(
        **SIZES, n_routed_experts=32, n_group=1, topk_group=1, first_k_dense_replace=0, moe_intermediate_size=16,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    ),
    "MiniMax-M2": MiniMaxM2Config(**SIZES, num_local_experts=32, head_dim=8),
}
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: loaded in bfloat16, the bias that chooses experts stays as the checkpoint has it, in float32")


def chosen(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the experts that each token gets in the only layer, sorted."""
    seen = []
    experts = next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))
    hook = experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    model.model.layers[0].mlp(hidden.to(model.dtype))
    hook.remove()
    return seen[0].sort(-1).values


results = {}
for name, config in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for key, bias in list(model.named_buffers()):
        if key.endswith("e_score_correction_bias"):
            path, _, last = key.rpartition(".")
            model.get_submodule(path).register_buffer(last, 8 + 0.1 * torch.rand(32))
    model.save_pretrained(sys.argv[1])
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    bias = next(bias for key, bias in loaded.named_buffers() if key.endswith("e_score_correction_bias"))
    with torch.no_grad():
        hidden = torch.randn(1, 1000, 32)
        moved = (chosen(model, hidden) != chosen(loaded, hidden)).any(-1).float().mean().item()
    print(f"{name}: the bias is {bias.dtype}, {100 * moved:.0f} % of the tokens get other experts than before")
    results[name] = (bias.dtype, moved)
as_found = results["DeepSeek-V3"] == (torch.float32, 0.0)
as_found = as_found and results["MiniMax-M2"][0] == torch.bfloat16 and results["MiniMax-M2"][1] > 0.2
kept = {}
for kind in ("minimax_m3_vl", "kimi_linear", "laguna", "step3p7", "longcat_flash"):
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    classes = [value for value in vars(module).values() if isinstance(value, type) and hasattr(value, "_get_dtype_plan")]
    kept[kind] = any("e_score_correction_bias" in (one._keep_in_fp32_modules_strict or ()) for one in classes)
print(f"kept in float32 by its code: {kept}")
sys.exit(0 if as_found and not any(kept.values()) else "changed since this was found")
EOF
