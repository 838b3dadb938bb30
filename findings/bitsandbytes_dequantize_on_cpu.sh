#!/usr/bin/env bash
# bitsandbytes 0.50.2, on a CPU with AVX-512: dequantize_4bit is wrong where in_features is even and no multiple of the block
# size (64). Blocks are taken from the flat matrix, but the kernel looks scales up as if each row began a new one, so
# weights come back with the scales of others; Linear4bit computes with them. Right with AVX2 alone, for a flat shape, for
# odd in_features, and on CUDA. Hurts whoever tests on a CPU with small sizes, such as 96.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 bitsandbytes==0.50.2 numpy==2.3.5
"$folder/venv/bin/python" - <<'EOF'
import sys

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

cpu = torch.backends.cpu.get_cpu_capability()
print("torch", torch.__version__, "bitsandbytes", bitsandbytes.__version__, cpu)
print("expected: a matrix and the same values as a flat tensor are dequantized alike")
wrong = {}
for rows, columns in ((64, 64), (64, 96), (64, 95), (64, 128), (3, 2880)):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    values = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4"))
    flat = dequantize_4bit(*quantize_4bit(weight.flatten(), quant_type="nf4")).view_as(weight)
    wrong[columns] = not torch.equal(values, flat)
    errors = [(result - weight).abs().max().item() for result in (values, flat)]
    print(f"[{rows}, {columns}]: largest error {errors[0]:.2f}, flat {errors[1]:.2f}")
as_found = [columns for columns, is_wrong in wrong.items() if is_wrong] == ([96] if cpu == "AVX512" else [])
sys.exit(0 if as_found else "changed since this was found")
EOF
