#!/usr/bin/env bash
# nemo-automodel 0.7.0: `rope_type` is not read. Whatever has a `factor` in the configuration of Qwen3-MoE is computed
# as YaRN: linear, dynamic and llama3 too, with YaRN's scale of the logits. YaRN itself differs: its bounds are not
# rounded, and an `attention_factor` is dropped. No warning. Right without a factor. The same table serves GLM-4.5,
# MiniMax-M2 and Qwen3-Next. Hurts whoever fine-tunes for long rows, as Qwen's model cards describe, and serves the
# model by another program.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.18.0 accelerate==1.15.0 torchao==0.18.0 \
    tiktoken==0.14.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" - 2>errors.txt <<'PY' || { cat errors.txt; exit 1; }
import sys
from importlib.metadata import version

import torch
import transformers

torch.cuda.current_device = lambda: 0  # the constructor asks for it; all is computed on the CPU
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
BACKEND = BackendConfig(attn="sdpa", linear="torch", experts="torch", dispatcher="torch", rope_fusion=False)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # of Qwen's model cards
KINDS = {
    "default": {"rope_type": "default"},
    "yarn": YARN,
    "yarn with attention_factor 1": YARN | {"attention_factor": 1.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
print("torch", torch.__version__, "transformers", transformers.__version__, "nemo-automodel", version("nemo-automodel"))
print("expected: frequencies, and so logits, as in transformers, or an error")
torch.manual_seed(0)
rows = torch.randint(2, 60, (1, 256))
seen = {}
for kind, rope in KINDS.items():
    base = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=128, vocab_size=64, num_hidden_layers=1,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=131072,
        rope_parameters={"rope_theta": 1e6, **rope},
    )).eval()
    for parameter in base.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    base.save_pretrained(kind)
    config = Qwen3MoeConfig.from_pretrained(kind)
    config.torch_dtype = torch.float32
    model = Qwen3MoeForCausalLM(config, backend=BACKEND).eval()
    table = model.model.rotary_emb
    table.device = torch.device("cpu")
    model.load_state_dict(model.state_dict_adapter.from_hf(load_file(f"{kind}/model.safetensors")))
    scale, frequencies = table._compute_concentration_and_inv_freq()
    ratios = frequencies / base.model.rotary_emb.inv_freq
    wanted_scale = base.model.rotary_emb.attention_scaling
    with torch.no_grad():
        off = (model(rows).logits - base(rows).logits).abs().max().item()
    print(f"{kind}: frequencies {ratios.min():.2f} to {ratios.max():.2f} times those of transformers, cos and sin "
          f"times {scale:.2f} ({wanted_scale:.2f} in transformers), logits differ by {off:.1e}")
    seen[kind] = round(ratios.min().item(), 2), round(ratios.max().item(), 2), round(scale, 2), off > 1e-3
as_found = {
    "default": (1.0, 1.0, 1.0, False),
    "yarn": (0.95, 1.03, 1.14, True),
    "yarn with attention_factor 1": (0.95, 1.03, 1.14, True),
    "linear": (1.0, 4.0, 1.14, True),
    "dynamic": (0.25, 1.0, 1.14, True),
    "llama3": (0.56, 1.0, 1.14, True),
}
sys.exit(0 if seen == as_found else "changed since this was found")
PY
