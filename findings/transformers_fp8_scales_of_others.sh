#!/usr/bin/env bash
# transformers 5.23.0: FineGrainedFP8Config(dequantize=True) takes the size of a block to be rows / rows of scales, not the
# checkpoint's weight_block_size. Where the last block is cut off, 192 rows in blocks of 128 say, it multiplies rows 96 to
# 127 by the scale of the next block. No error. (DeepSeek-V3's 576 rows, no multiple of their 5 scales, raise ValueError.)
# Hurts whoever dequantizes a published FP8 model to train or merge it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - "$folder/model" <<'EOF'
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
folder = Path(sys.argv[1])
config = LlamaConfig(vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4)
torch.manual_seed(0)
tensors, right = {}, {}
for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items():
    if name.endswith("_proj.weight"):  # in DeepSeek-V3's layout: a scale for each 128 x 128, the last ones cut off
        rows, columns = (-(-side // 128) for side in weight.shape)
        scales = torch.arange(1.0, rows * columns + 1).view(rows, columns)
        tensors[name] = weight.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        right[name] = tensors[name].float() * whole
    else:
        tensors[name] = weight.clone()
folder.mkdir()
save_file(tensors, folder / "model.safetensors", {"format": "pt"})
config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
config.save_pretrained(folder)
loaded = AutoModelForCausalLM.from_pretrained(
    folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
).state_dict()
print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: each weight times the scale of its block of 128 x 128")
wrong = {}
for name, weight in right.items():
    wrong[name.split(".")[-2]] = (loaded[name] != weight).sum().item()
    print(f"{name} {list(weight.shape)}: {wrong[name.split('.')[-2]]} of {weight.numel()} weights wrong")
mlp = {name: count for name, count in wrong.items() if name in ("gate_proj", "up_proj", "down_proj")}
as_found = all(3000 < count <= 32 * 128 for count in mlp.values()) and sum(wrong.values()) == sum(mlp.values())
sys.exit(0 if as_found else "changed since this was found")
EOF
