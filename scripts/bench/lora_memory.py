"""Predicted memory of LoRA on all experts by how its factors are stored, of this tree and of others.

    python scripts/bench/lora_memory.py --json docs/benchmarks/lora_memory.json --page docs/benchmarks/lora_memory.md
    git worktree add ../before 7e9c7804
    python scripts/bench/lora_memory.py --tree 7e9c7804=../before --json docs/benchmarks/lora_memory.json

Each prediction is a `moetune predict` of its own, by trace, without a card, so it runs the code of the tree it is for.
`allocated` is `peak_allocated` for the expected routing; a run fits a card if `peak_process` does.
Variants whose keys a tree does not know are left out. Predictions that the JSON file has are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from _common import commit, write_json, write_table

from moetune.models.catalog.gpus import find_gpu

HERE = Path(__file__).parents[2]
MODELS: dict[str, tuple[str, int, int, str]] = {
    "Qwen3-30B-A3B r16, 2 × 2,048": ("qwen3-30b-a3b", 16, 2, "rtx-4090"),
    "Qwen3.5-35B-A3B r16, 1 × 2,048": ("qwen3.5-35b-a3b", 16, 1, "rtx-4090"),
    "Qwen3-Next-80B-A3B r8, 1 × 2,048": ("qwen3-next-80b-a3b", 8, 1, "l40s"),
}
"""Row of the table -> catalog name, rank, sequences of a micro-batch, the card that it may fit."""
BF16, SHARED = ["--set=adapt.lora.dtype=bf16"], ["--set=adapt.lora.share=outer"]
FUSED = ["--set=optimizer.fused_backward=true", "--set=train.accumulate=1", "--set=train.max_grad_norm=0"]
VARIANTS: dict[str, list[str]] = {
    "float32": [],
    "bf16": BF16,
    "bf16, shared": [*BF16, *SHARED],
    "bf16, shared, fused backward": [*BF16, *SHARED, *FUSED],
}


def predicted(tree: Path, model: str, rank: int, rows: int, options: list[str]) -> dict[str, Any] | None:
    """The bytes at the peak; None if the tree does not know an option."""
    words = [
        sys.executable,
        "-m",
        "moetune",
        "predict",
        model,
        "--json",
        f"--lora={rank}",
        f"--set=train.micro_batch={rows}",
    ]
    words += ["--set=train.sequence_length=2048", *options]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"PYTHONPATH": str(tree), "MOETUNE_CACHE": cache}
        done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        return None
    report = json.loads(done.stdout)
    (only,) = report["ranks"]
    return {"allocated": only["peak_allocated"], "process": only["peak_process"]}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """A row for each model and variant, a column for each tree."""
    trees = list(dict.fromkeys(key.split(" | ")[0] for key in found))
    lines = ["| LoRA on attention and all experts, NF4 | factors |" + "".join(f" {tree} |" for tree in trees)]
    lines.append("|---|---|" + "---:|" * len(trees))
    for label, variant in product(MODELS, VARIANTS):
        cells = []
        for tree in trees:
            entry = found.get(f"{tree} | {label} | {variant}")
            card = find_gpu(MODELS[label][-1])
            fits = ", fits" * (entry is not None and entry["process"] <= card.memory.value)
            cells.append("" if entry is None else f"{entry['allocated'] / 2**30:.2f} GiB{fits}")
        if any(cells):
            lines.append(f"| {label} | {variant} |" + "".join(f" {cell} |" for cell in cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=PATH", help="another tree; repeatable")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    report = json.loads(options.json.read_text()) if options.json.exists() else {"predictions": {}}
    for name, path in [*(tree.split("=", 1) for tree in options.tree), ("this tree", str(HERE))]:
        for (label, (model, rank, rows, _)), (variant, more) in product(MODELS.items(), VARIANTS.items()):
            key = f"{name} | {label} | {variant}"
            if key not in report["predictions"]:
                entry = predicted(Path(path).resolve(), model, rank, rows, more)
                if entry is not None:
                    report["predictions"][key] = entry | {"commit": commit() if name == "this tree" else name}
                    print(key, entry, flush=True)
                    write_json(report, options.json)
    if options.page is not None:
        write_table(table(report["predictions"]), options.page)


if __name__ == "__main__":
    main()
