#!/usr/bin/env bash
# nvidia-modelopt 0.47.0, compressed-tensors 0.20.1, gguf 0.19.0: three rules for the exponent of an MXFP4 block, whose largest
# code is 6. ModelOpt takes the next power of two above amax / 6, so that nothing is cut off; compressed-tensors goes up
# from an amax of 7, gguf from 8, and cut what is above 6 down to it: 7.9 becomes 6. Hurts whoever converts the same
# weights twice and takes both for the same model, or lays one library's codes beside another's scales.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  torch==2.13.0 nvidia-modelopt==0.47.0 compressed-tensors==0.20.1 gguf==0.19.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'EOF' 2>/dev/null
import sys
from importlib.metadata import version

import torch
from compressed_tensors.quantization.utils import generate_mx_scales
from gguf import GGMLQuantizationType, quants
from modelopt.torch.quantization.qtensor import MXFP4QTensor

LARGEST = [4.0, 5.9, 6.1, 6.9, 7.1, 7.9, 8.1, 12.0]
print(", ".join(f"{name} {version(name)}" for name in ("torch", "nvidia-modelopt", "compressed-tensors", "gguf")))
print("expected: one exponent for the same block")
blocks = torch.zeros(len(LARGEST), 32)
blocks[:, 0] = torch.tensor(LARGEST)
packed, scales = MXFP4QTensor.quantize(blocks, 32)
of_gguf = quants.quantize(blocks.numpy(), GGMLQuantizationType.MXFP4)
exponents = {
    "ModelOpt": [int(scale) - 127 for scale in scales.flatten()],
    "compressed-tensors": [int(scale) - 127 for scale in generate_mx_scales(blocks.abs().amax(1))],
    "gguf": [int(scale) - 127 for scale in of_gguf[:, 0]],
}
values = {
    "ModelOpt": packed.dequantize(dtype=torch.float32, scale=scales, block_sizes={-1: 32})[:, 0].tolist(),
    "gguf": quants.dequantize(of_gguf, GGMLQuantizationType.MXFP4)[:, 0].tolist(),
}
print(f"largest of the block: {LARGEST}")
for name, of_blocks in exponents.items():
    print(f"{name}: exponents {of_blocks}" + (f", read back as {values[name]}" if name in values else ""))
as_found = list(exponents.values()) == [
    [0, 0, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 1, 1],
]
sys.exit(0 if as_found and values["gguf"][5] == 6.0 and values["ModelOpt"][5] == 8.0 else "changed since this was found")
EOF
