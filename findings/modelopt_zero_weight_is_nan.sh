#!/usr/bin/env bash
# nvidia-modelopt 0.47.0: NVFP4QTensor.quantize of a weight that is all zeros writes NaN as the scale of every block (0
# / 0: the scale of the whole weight is 0 too), and dequantize returns NaN; a block of zeros in another weight is right.
# Hurts checkpoints with pruned or unused experts, or a projection that begins at zero: one such matrix makes every
# logit NaN after the export, not before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 nvidia-modelopt==0.47.0 numpy==2.3.5 \
  requests==2.32.5 huggingface_hub==1.5.0  # which modelopt imports, and does not ask for
"$folder/venv/bin/python" - <<'EOF' 2>/dev/null
import sys

import modelopt
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor

print("torch", torch.__version__, "modelopt", modelopt.__version__)
print("expected: zeros, and scales that are numbers")
nan = {}
torch.manual_seed(0)
for name, weight in {
    "zeros": torch.zeros(8, 64),
    "one block of zeros": torch.randn(8, 64).index_fill(1, torch.arange(16), 0.0),
    "one weight that is not zero": torch.zeros(8, 64).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1e-3)),
}.items():
    packed, scales, of_weight = NVFP4QTensor.quantize(weight, 16)
    options = {"dtype": torch.float32, "scale": scales, "double_scale": of_weight, "block_sizes": {-1: 16}}
    values = packed.dequantize(**options)
    nan[name] = (scales.isnan().sum().item(), values.isnan().sum().item())
    print(f"{name}: scale of the weight {of_weight:.3g}; NaN: {nan[name][0]} of {scales.numel()} scales, "
          f"{nan[name][1]} of {values.numel()} values")
sys.exit(0 if list(nan.values()) == [(32, 512), (0, 0), (0, 0)] else "changed since this was found")
EOF
