#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict of an optimizer that has made no step makes one, with gradients of zeros, to
# have a state to return, and the optimizer keeps it: AdamW's first steps are 0.74, 0.86, 0.92 times as long as without
# the call, SGD's with dampening 0.9. No warning. Right once a step was made. Hurts whoever saves a checkpoint before
# the first step, or reads the state to load one that turns out not to be there: the run is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
export OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys
import warnings

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

STEPS = 4
MADE = {  # an optimizer, and how long its first step is after the state was read
    "AdamW": (lambda weights: torch.optim.AdamW(weights, lr=1e-2), 0.744),
    "SGD, dampened": (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.1), 0.9),
    "SGD": (lambda weights: torch.optim.SGD(weights, lr=0.1), 1.0),
}
documented = get_optimizer_state_dict.__doc__.strip().splitlines()[0]


def lengths(make, read_before):
    """Return how far each step moves the weights, where the state is read before one of them (None: never)."""
    torch.manual_seed(0)
    model, inputs, moved = torch.nn.Linear(8, 8), torch.randn(16, 8), []
    optimizer = make(model.parameters())
    for step in range(STEPS):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        if step == read_before:
            get_optimizer_state_dict(model, optimizer)
        model(inputs).square().mean().backward()
        optimizer.step()
        moved.append((model.weight - before).norm())
    return torch.stack(moved).detach()


warnings.simplefilter("error", UserWarning)
print("torch", torch.__version__, f'get_optimizer_state_dict: "{documented}"')
print("expected: to read a state changes no step")
as_found = True
for name, (make, found) in MADE.items():
    ratios = {before: lengths(make, before) / lengths(make, None) for before in (0, 2)}
    for before, ratio in ratios.items():
        print(f"{name}, state read before step {before + 1}: steps are {[round(r, 3) for r in ratio.tolist()]} times as long")
    as_found &= abs(ratios[0][0].item() - found) < 5e-3 and torch.equal(ratios[2], torch.ones(STEPS))
sys.exit(0 if as_found else "changed since this was found")
EOF
