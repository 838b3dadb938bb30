"""The closed form beside the trace, for every model of the catalog at full size.

    python scripts/bench/formula_vs_trace.py > table.md

NF4 base, bfloat16, full checkpointing, AdamW, one sequence of 2048 tokens on an L40S, balanced routing; routers alone
(dense models: norms), then LoRA of rank 16 on attention and experts. Prints the peak of allocated memory by both, by
how far the formula is off, and how long each took. The formula's step was recorded at 1024 tokens; a record that was on
disk already takes no time (`MOETUNE_CACHE=$(mktemp -d)` begins without any).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import moetune.models.catalog
from moetune.config.schema import RunConfig
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve

MODELS = sorted(path.stem for path in (Path(moetune.models.catalog.__file__).parent / "models").glob("*.json"))
GiB, LENGTH, GPU = 2**30, 2048, "l40s"


def config_of(name: str, what: str) -> RunConfig:
    dense = name.startswith("llama")
    adapt: dict[str, Any] = {"also": ["norm"]} if dense else {"router": "all"}
    if what == "lora":
        adapt = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention"] if dense else ["attention", "experts"]}}
    return RunConfig.model_validate(
        {
            "model": {
                "path": name,
                "base": "nf4",
                "dtype": "bf16",
                "weights": "random",
            },
            "adapt": adapt,
            "optimizer": {"name": "adamw"},
            "train": {"micro_batch": 1, "sequence_length": LENGTH, "accumulate": 1, "checkpointing": "full"},
            "data": {"train": "unread", "packing": True},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="catalog names; all by default")
    print("| model | trains | trace | formula | off by | trace took | recording took | formula took |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    card = find_gpu(GPU)
    for name in parser.parse_args().models:
        for what in ("router", "lora"):
            run = resolve(config_of(name, what), "cuda")
            other = run.config.train.model_copy(update={"sequence_length": LENGTH // 2})
            form = ClosedForm(run, gpu=card)
            start = time.perf_counter()
            traced = trace(run, gpu=card)
            traced_at = time.perf_counter()
            form.at(run.config.model_copy(update={"train": other}))
            recorded_at = time.perf_counter()
            formula = form.at(run.config).parts().total
            end = time.perf_counter()
            peak = traced.parts().total
            took = f"{traced_at - start:.1f} s | {recorded_at - traced_at:.1f} s | {1000 * (end - recorded_at):.0f} ms"
            off = f"{100 * (formula / peak - 1):+.2f} %"
            print(f"| {name} | {what} | {peak / GiB:.2f} GiB | {formula / GiB:.2f} GiB | {off} | {took} |", flush=True)


if __name__ == "__main__":
    main()
