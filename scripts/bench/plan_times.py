"""How long `moetune plan` takes, from an empty cache and again.

    python scripts/bench/plan_times.py --json docs/benchmarks/plan_times.json > table.md

Each plan is a process of its own, with `MOETUNE_CACHE` an empty folder; the second run finds what the first one wrote.
Wall time is what a user waits, imports included; CPU time is that of the process and of those that it started. The
number of processes is the command's own choice: one for each core, up to four.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from _common import commit, cpu_name, versions, write_json

import moetune.models.catalog

MODELS = sorted(path.stem for path in (Path(moetune.models.catalog.__file__).parent / "models").glob("*.json"))
LENGTH = 1024


def plan(model: str, gpu: str, goal: str, count: int, cache: str, limit: float) -> dict[str, Any]:
    """Run a plan once; return its seconds, its candidates and its exit status (-9: it ran into the limit)."""
    words = [sys.executable, "-m", "moetune", "plan", model, "--gpu", gpu, "--count", str(count), "--json"]
    words += ["--min-sequence", str(LENGTH)] + ([] if goal == "all" else ["--goal", goal])
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run(
            words, env=os.environ | {"MOETUNE_CACHE": cache}, capture_output=True, text=True, timeout=limit, check=False
        )
        status, out = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        status, out = -9, ""
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(out)["candidates"] if status in (0, 1) else []
    best = [one["trains"] for one in found[:1]]
    return {"wall": wall, "cpu": cpu, "status": status, "rows": len(found), "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="catalog names; all by default")
    parser.add_argument("--gpu", nargs="+", default=["15GiB", "24GiB", "44GiB", "80GiB"])
    parser.add_argument("--goal", nargs="+", default=["all", "router", "experts", "lora"])
    parser.add_argument("--count", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a plan is ended")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "versions": versions("moetune", "torch", "transformers"),
        "commit": commit(),
        "load_before": os.getloadavg(),
        "plans": [],
    }
    print("| model | goal | card | empty cache: wall, CPU | again: wall, CPU | rows | first row |")
    print("|---|---|---|---:|---:|---:|---|", flush=True)
    for model, count, gpu, goal in product(options.models, options.count, options.gpu, options.goal):
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (plan(model, gpu, goal, count, cache, options.limit) for _ in range(2))
        card = gpu if count == 1 else f"{count} × {gpu}"
        times = (f"{one['wall']:.1f} s, {one['cpu']:.1f} s" for one in (cold, warm))
        first = cold["best"][0] if cold["best"] else {1: "nothing fits", -9: "not ended"}.get(cold["status"], "refused")
        print(f"| {model} | {goal} | {card} | {' | '.join(times)} | {cold['rows']} | {first} |", flush=True)
        report["plans"].append({"model": model, "gpu": gpu, "goal": goal, "count": count, "cold": cold, "warm": warm})
        if options.json is not None:
            write_json(report, options.json)


if __name__ == "__main__":
    main()
