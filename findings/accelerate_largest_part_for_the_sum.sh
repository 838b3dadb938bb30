#!/usr/bin/env bash
# accelerate 1.15.0: the column “Training using Adam” of `accelerate estimate-memory` is the largest of four numbers (for
# the model, gradients, optimizer and a step), not their sum. In float32 the step's is the sum of the others, in float16
# it is the optimizer's: 8 bytes a parameter where the parts that it computes itself are 18, and float16 training seems to
# take half of float32's. Training by autocast holds 16 in tensors alone. Hurts whoever buys a card by it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'EOF'
import sys

import accelerate
import torch
from accelerate.commands.estimate import estimate_training_usage

print("torch", torch.__version__, "accelerate", accelerate.__version__)
print("expected: what training holds, 16 bytes a parameter, or more")
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)])
count = sum(parameter.numel() for parameter in model.parameters())
optimizer = torch.optim.Adam(model.parameters())
with torch.autocast("cpu", torch.bfloat16):
    model(torch.randn(8, 256)).square().mean().backward()
optimizer.step()
held = [*model.parameters(), *[parameter.grad for parameter in model.parameters()]]
held += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
print(f"tensors after a step by autocast: {sum(tensor.nbytes for tensor in held) / count} bytes a parameter")
shown = {}
for precision in ("float32", "float16"):
    parts = {name: size / count for name, size in estimate_training_usage(4 * count, precision).items()}
    shown[precision] = max(parts.values())  # as estimate_command does
    print(f"{precision}: {shown[precision]} bytes a parameter in the table, of {parts}")
as_found = sum(tensor.nbytes for tensor in held) == 16 * count and shown == {"float32": 16.0, "float16": 8.0}
sys.exit(0 if as_found else "changed since this was found")
EOF
