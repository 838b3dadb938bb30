#!/usr/bin/env bash
# deepspeed 0.19.8: the gate of its MoE layer draws at random also after eval(). With k=2 the second expert is sampled
# and not the second best; with k=1 the tokens that an expert has no room for are drawn by lot. Two evaluations of the
# same rows give two results. No warning. Right with k above 2, and with top2_2nd_expert_sampling and use_rts off. Hurts
# whoever compares evaluations: what differs may be the draw, not the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 setuptools==80.9.0 wheel==0.45.1 packaging==25.0
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
export OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF' 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
import sys
from importlib.metadata import version

import torch
from deepspeed.moe.sharded_moe import TopKGate

TOKENS, EXPERTS, WIDTH = 64, 8, 16
print("torch", torch.__version__, "deepspeed", version("deepspeed"))
print("expected: in evaluation mode a token goes to the same experts each time")
seen = []
for k, options in ((1, {}), (1, {"use_rts": False}), (2, {}), (2, {"top2_2nd_expert_sampling": False}), (3, {})):
    torch.manual_seed(0)
    room = 1.0 if k == 1 else 8.0  # k=1: as many places as tokens, the default; others: place for every token
    gate = TopKGate(WIDTH, EXPERTS, k=k, eval_capacity_factor=room, min_capacity=0, **options).eval()
    torch.nn.init.normal_(gate.wg.weight)
    rows = torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        weights = [gate(rows)[1].sum(dim=-1) for _ in range(2)]  # [tokens, experts]
    differ = ((weights[0] - weights[1]).abs().amax(dim=-1) > 1e-6).sum().item()
    seen.append(differ > 0)
    print(f"k={k} {options or 'defaults'}: {differ} of {TOKENS} tokens are routed otherwise the second time")
sys.exit(0 if seen == [True, False, True, False, False] else "changed since this was found")
EOF
