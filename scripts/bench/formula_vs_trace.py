"""The closed form beside the trace, for every model of the catalog at full size.

    python scripts/bench/formula_vs_trace.py > table.md

NF4 base, bfloat16, full checkpointing, AdamW, one sequence of 2048 tokens, balanced routing; routers alone (dense
models: norms), then LoRA of rank 16 on attention and experts. Prints the peak of allocated memory by both, by how far
the formula is off, and how long each took. The first reading of a model, a second or two, is in neither time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import moetune.catalog
from moetune.config import RunConfig
from moetune.memory.facts import read_facts
from moetune.memory.formulas import quantities
from moetune.memory.trace import trace

MODELS = sorted(path.stem for path in (Path(moetune.catalog.__file__).parent / "models").glob("*.json"))
GiB = 2**30


def run(name: str, what: str) -> RunConfig:
    dense, eager = name.startswith("llama"), name.startswith("gpt-oss")
    adapt: dict[str, Any] = {"also": ["norm"]} if dense else {"router": "all"}
    if what == "lora":
        adapt = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention"] if dense else ["attention", "experts"]}}
    return RunConfig.model_validate(
        {
            # Some are published quantized: their sizes are those of any weights.
            "model": {"path": name, "dtype": "bf16", "weights": "random", "attention": "eager" if eager else "sdpa"},
            "adapt": adapt,
            "optimizer": {"name": "adamw"},
            "train": {"micro_batch": 1, "sequence_length": 2048, "accumulate": 1, "checkpointing": "full"},
            "data": {"train": "unread", "packing": not eager},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="catalog names; all by default")
    print("| model | trains | trace | formula | off by | trace took | formula took |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in parser.parse_args().models:
        for what in ("router", "lora"):
            config, facts = run(name, what), read_facts(name)
            quantities(facts, config)
            start = time.perf_counter()
            traced = trace(config)
            between = time.perf_counter()
            formula = quantities(facts, config).peak()[1].total
            end = time.perf_counter()
            peak = traced.parts(traced.peak).total
            took = f"{between - start:.1f} s | {1000 * (end - between):.1f} ms"
            off = f"{100 * (formula / peak - 1):+.2f} %"
            print(f"| {name} | {what} | {peak / GiB:.2f} GiB | {formula / GiB:.2f} GiB | {off} | {took} |", flush=True)


if __name__ == "__main__":
    main()
