#!/usr/bin/env bash
# torch 2.13.0: Adafactor takes fused experts [E, R, C] for E matrices in its row and column means, and for one matrix
# where it limits the update's root mean square to d = 1: an expert that wakes up moves up to the root of E times as far
# as it would as a matrix of its own, and the others by less. The same in transformers 5.23.0's Adafactor. Right while
# gradients keep their size. Hurts whoever trains fused experts by it: an expert that tokens come back to leaps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF'
import sys

import torch
import transformers

EXPERTS, ROWS, COLUMNS, STEPS, RATE = 32, 24, 16, 50, 1e-2
MADE = {
    "torch": lambda weights: torch.optim.Adafactor(weights, lr=RATE),
    "transformers": lambda weights: transformers.Adafactor(
        weights, lr=RATE, scale_parameter=False, relative_step=False, clip_threshold=1.0
    ),
}


def last_moves(make, fused, waking):
    """Return how far each expert moves in the last step, in steps of the learning rate for each of its elements.

    The first expert's gradients are `waking` times as large as the others' until then, and as large in it.
    """
    draw = torch.Generator().manual_seed(0)
    experts = torch.randn(EXPERTS, ROWS, COLUMNS, generator=draw)
    experts /= experts.flatten(1).norm(dim=1)[:, None, None] / (ROWS * COLUMNS) ** 0.5  # all have one size
    weights = [torch.nn.Parameter(part.clone()) for part in ([experts] if fused else experts)]
    optimizer = make(weights)
    for step in range(STEPS):
        gradient = torch.randn(EXPERTS, ROWS, COLUMNS, generator=draw)
        gradient[0] *= waking if step < STEPS - 1 else 1.0
        for weight, part in zip(weights, [gradient] if fused else gradient, strict=True):
            weight.grad = part
        before = torch.stack([weight.detach().clone() for weight in weights]).view(EXPERTS, -1)
        optimizer.step()
    after = torch.stack([weight.detach() for weight in weights]).view(EXPERTS, -1)
    return (after - before).norm(dim=1) / (ROWS * COLUMNS) ** 0.5 / RATE


print("torch", torch.__version__, "transformers", transformers.__version__)
print("expected: an expert moves as far in a tensor of all experts as it does as a matrix of its own")
as_found = True
for name, make in MADE.items():
    for waking in (1.0, 1e-3):
        together, alone = (last_moves(make, fused, waking) for fused in (True, False))
        first, others = together[0] / alone[0], (together[1:] / alone[1:]).mean()
        print(f"{name}, gradients of the first expert {waking:g} of the others', then as large: it moves "
              f"{first:.2f} times as far as alone, the others {others:.2f} times")
        as_found &= (first.item() > 3 and others.item() < 0.9) if waking < 1 else abs(first.item() - 1) < 0.1
sys.exit(0 if as_found else "changed since this was found")
EOF
