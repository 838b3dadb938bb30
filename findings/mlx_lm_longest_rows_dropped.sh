#!/usr/bin/env bash
# mlx-lm 0.32.2: for training and evaluation rows are sorted by length and cut into whole batches, and the rest is left
# out: always the longest rows, so that up to batch_size - 1 of them are in no batch, however many epochs pass. Nor are
# they in an evaluation of the entire set (-1 batches). No warning. Right where batch_size divides the number of rows.
# Hurts whoever trains on few rows or compares models by them: what is left out is not chosen at random.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'mlx[cpu]==0.32.4' mlx-lm==0.32.2 transformers==5.23.0 numpy==2.3.5
export HF_HUB_OFFLINE=1 HF_HOME=$folder/home OMP_NUM_THREADS=1
"$folder/venv/bin/python" - <<'EOF' 2>"$folder/log" || { tail -n 15 "$folder/log" >&2; exit 1; }
import itertools
import sys
from importlib.metadata import version

import mlx.core as mx
from mlx import nn
from mlx_lm.tuner.trainer import evaluate, iterate_batches

EPOCHS, BATCH = 50, 4
print(*(f"{name} {version(name)}" for name in ("mlx", "mlx-lm")))
print(f"expected: every row is in a batch of {EPOCHS} epochs of training, and in an evaluation of all batches")


def lengths_seen(batches) -> set[int]:
    """Return the lengths of the rows of these batches, which tell the rows apart."""
    return {length for _, bounds in batches for length in bounds[:, 1].tolist()}


def count(model, batch, bounds):
    """Stand in for a loss: record the lengths of the rows."""
    evaluated.update(bounds[:, 1].tolist())
    return mx.array(0.0), mx.array(1)


missed = {}
for number in (12, 15):
    rows = [([1] * length, 0) for length in range(10, 10 + number)]
    every = {len(tokens) for tokens, _ in rows}
    batches = iterate_batches(rows, BATCH, 2048, loop=True, seed=0)
    trained = lengths_seen(itertools.islice(batches, EPOCHS * number // BATCH))
    evaluated: set[int] = set()
    evaluate(nn.Linear(1, 1), rows, BATCH, num_batches=-1, loss=count)
    missed[number] = (sorted(every - trained), sorted(every - evaluated))
    print(f"{number} rows of 10 to {max(every)} tokens, {BATCH} a batch: "
          f"never trained {missed[number][0]}, not evaluated {missed[number][1]}")
as_found = missed == {12: ([], []), 15: ([22, 23, 24], [22, 23, 24])}
sys.exit(0 if as_found else "changed since this was found")
EOF
