#!/usr/bin/env bash
# torch 2.13.0: nn.functional.grouped_mm “ignores” rows beyond the last offset, its documentation says, and asks that
# there be some. Their outputs are not zero but memory as it was found, and so is the gradient of the input's rows
# there, which flows on into what made them: NaN where NaN lay in memory. Right for rows within the offsets. Hurts
# whoever pads tokens of experts to a fixed number of rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'EOF'
import sys

import torch
from torch.nn.functional import grouped_mm

EXPERTS, ROWS, WIDTH = 4, 64, 32
torch.manual_seed(0)
print("torch", torch.__version__)
print("expected: rows beyond the offsets have outputs and gradients of zero, or at least do not change from call to call")


def leave_in_memory(value: float) -> None:
    tensors = [torch.full((ROWS, WIDTH), value, dtype=torch.bfloat16) for _ in range(64)]
    del tensors


within, beyond = [], []
for value in (1.0, 2.0, float("nan")):
    rows = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16)
    offsets = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    leave_in_memory(value)
    output = grouped_mm(rows, weight, offs=offsets)
    loss = output[:32].float().sum()
    leave_in_memory(value)
    loss.backward()
    within.append((output[:32].unique().tolist(), rows.grad[:32].unique().tolist()))
    beyond.append((output[32:].unique()[:3].tolist(), rows.grad[32:].unique()[:3].tolist()))
    print(f"{value} lay in memory: outputs and gradients within the offsets {within[-1]}, beyond {beyond[-1]}")
as_found = all(pair == ([WIDTH], [WIDTH]) for pair in within)
as_found = as_found and len({str(pair) for pair in beyond}) > 1
sys.exit(0 if as_found else "changed since this was found")
EOF
