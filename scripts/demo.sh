#!/usr/bin/env bash
# From a clone to a fine-tuned mixture of experts, on a laptop CPU, in a few minutes. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
moetune=.venv/bin/moetune

echo
echo "==> What is in Mixtral-8x7B, and what would training its routers train? (no weights, no network)"
$moetune count mixtral-8x7b --run configs/mixtral-8x7b-router.yaml

echo
echo "==> Fine-tune two experts of two layers of a tiny Mixtral, on a 4-bit base, on text unlike any it has seen"
sed -n '/^adapt:/,/^train:/p' configs/tiny-experts.yaml | sed '$d'
$moetune train configs/tiny-experts.yaml --set output=runs/demo --overwrite

echo
echo "==> The run folder"
find runs/demo -type f | sort
echo
echo "held-out loss by step:"
.venv/bin/python - <<'PY'
import json
for line in map(json.loads, open("runs/demo/metrics.jsonl")):
    if "eval_loss" in line:
        print(f"  step {line['step']:3}  {line['eval_loss']:.4f}")
PY
echo
echo "Next: .venv/bin/moetune init --list, README.md"
