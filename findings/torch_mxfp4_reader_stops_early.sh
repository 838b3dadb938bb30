#!/usr/bin/env bash
# torch 2.13.0: `QuantizedHuggingFaceStorageReader`, by which distributed checkpoints read gpt-oss as it is published
# (experts in MXFP4: `_blocks` and `_scales`), reads the first 32nd of each row, and leaves the rest as it was: the
# reader corrects the size of the whole tensor, not of its chunks, whose third dimension is the number of blocks. No
# check finds that values are missing. Right for 8-bit matrices in blocks of 128 x 128, as DeepSeek-V3's. Hurts whoever
# starts a training from gpt-oss by torch's or torchtitan's loader: experts are 31 parts random.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.3.5
export OMP_NUM_THREADS=1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'EOF'
import json
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

EXPERTS, ROWS, COLUMNS = 4, 64, 256
gate_up = "model.layers.0.mlp.experts.gate_up_proj"
ONES_OF_4_BITS, SCALE_OF_1 = 0x22, 127  # two values 1.0 to a byte; exponents have a bias of 127
save_file(
    {
        f"{gate_up}_blocks": torch.full((EXPERTS, ROWS, COLUMNS // 32, 16), ONES_OF_4_BITS, dtype=torch.uint8),
        f"{gate_up}_scales": torch.full((EXPERTS, ROWS, COLUMNS // 32), SCALE_OF_1, dtype=torch.uint8),
        "q_proj.weight": torch.ones(256, 256).to(torch.float8_e4m3fn),
        "q_proj.weight_scale_inv": torch.ones(2, 2),
    },
    "model.safetensors",
    {"format": "pt"},
)
names = [f"{gate_up}_blocks", f"{gate_up}_scales", "q_proj.weight", "q_proj.weight_scale_inv"]
with open("model.safetensors.index.json", "w") as index:
    json.dump({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}, index)
wanted = {f"{gate_up}_blocks": torch.zeros(EXPERTS, ROWS, COLUMNS), "q_proj.weight": torch.zeros(256, 256)}
dcp.load(wanted, storage_reader=QuantizedHuggingFaceStorageReader("."))
print("torch", torch.__version__)
print("expected: every value is read, and is 1")
read = {name: (value == 1).float().mean().item() for name, value in wanted.items()}
for name, share in read.items():
    columns = (wanted[name] == 1).flatten(0, -2).all(0).nonzero().flatten()
    print(f"{name}: {share:.1%} of the values are 1, columns {columns[0]} to {columns[-1]} of {wanted[name].shape[-1]}")
    if share < 1:
        print("  the others are", wanted[name][wanted[name] != 1].unique().tolist(), "as they were before")
sys.exit(0 if [*read.values()] == [1 / 32, 1] else "changed since this was found")
EOF
