#!/usr/bin/env bash
# deepspeed 0.19.8: estimate_zero{2,3}_model_states_mem_needs_all_live(model) tells shared parameters by their address, which
# is 0 for every tensor on the meta device. So of a model made there, as one makes a model too large for the machine, it
# counts the last parameter only, and prints a plausible table for that. Hurts whoever asks before renting: Mixtral-8x7B
# “needs” 7.5 GB of GPU memory instead of 788.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 setuptools==80.9.0
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
"$folder/venv/bin/python" - <<'EOF' 2>/dev/null
import contextlib
import io
import re
import sys

import deepspeed
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live

print("torch", torch.__version__, "deepspeed", deepspeed.__version__)
print("expected: the same for a model with storage and on the meta device")
answers = {}
for device in ("cpu", "meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, device=device) for _ in range(32)])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1)
    counted = re.search(r"SW: Model with (.*)", printed.getvalue())[1]
    without_offload = printed.getvalue().strip().splitlines()[-1]
    answers[device] = counted
    print(f"{device}, {sum(p.numel() for p in model.parameters()):,} parameters: “{counted}” {without_offload.split('|')[1]}")
as_found = answers["cpu"].startswith("33M") and answers["meta"].startswith("0M")
sys.exit(0 if as_found else "changed since this was found")
EOF
