#!/usr/bin/env bash
# torch 2.13.0, on an x86 CPU: scaled_dot_product_attention of a query that is NaN returns zeros if there are fewer keys
# than a vector register holds float32 (16 with AVX-512, 8 with AVX2) and no mask is given, in float32 and bfloat16.
# From that many keys on, and in the math kernel, it returns NaN.
# Hurts checks on tiny models and short texts: with a projection that is NaN the loss is finite, so that a test of the
# loss passes; gradients are NaN, and the optimizer's step spreads it to all weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'EOF'
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
print("expected: outputs of NaN queries, and a loss that depends on them, are NaN")
as_found = True
for dtype in (torch.float32, torch.bfloat16):
    for keys in (1, 7, 8, 15, 16, 64):
        query = torch.full((1, 2, keys, 16), torch.nan, dtype=dtype)
        key = torch.ones(1, 2, keys, 16, dtype=dtype)
        out = scaled_dot_product_attention(query, key, key, is_causal=True)
        with sdpa_kernel(SDPBackend.MATH):
            math = scaled_dot_product_attention(query, key, key, is_causal=True)
        zero, nan = bool((out == 0).all()), bool(out.isnan().all())
        print(f"{dtype}, {keys} keys: all zero: {zero}, all NaN: {nan}; math kernel: {math.flatten()[0].item()}")
        as_found = as_found and bool(math.isnan().all()) and (zero if keys < 8 else nan if keys > 15 else zero or nan)

torch.manual_seed(0)
project = {name: torch.nn.Linear(16, 16) for name in ("query", "key", "value")}
project["query"].weight.data[3, 5] = torch.nan
text = torch.randn(1, 2, 7, 16)
query, key, value = (linear(text) for linear in project.values())
loss = (text + scaled_dot_product_attention(query, key, value)).square().mean()
loss.backward()
gradients = {name: bool(linear.weight.grad.isnan().any()) for name, linear in project.items()}
print(f"7 keys, one weight of the query's projection NaN: loss {loss.item():.3f}; gradient with NaN: {gradients}")
as_found = as_found and bool(loss.isfinite())
sys.exit(0 if as_found else "changed since this was found")
EOF
