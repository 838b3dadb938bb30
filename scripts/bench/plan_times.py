"""How long `moetune plan` takes, from an empty cache and again.

    python scripts/bench/plan_times.py qwen3-30b-a3b --json docs/benchmarks/plan_times.json
    python scripts/bench/plan_times.py --json docs/benchmarks/plan_times.json --page docs/benchmarks/plan_times.md

Each plan is a process of its own, with `MOETUNE_CACHE` an empty folder; the second run finds what the first one wrote.
Wall time is what a user waits, imports included; CPU time is that of the process and of those that it started. The
number of processes is the command's own choice: one for each core, up to four. Plans that the JSON file has are not run
again, so it can be filled bit by bit; each has its commit, the load of the machine, and the seconds of a plain loop
before it (`loop`), by which runs on machines of different speed can be compared. With `--page` nothing is run: the
page's table is written anew, from the JSON file.
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
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from _common import commit, cpu_name, spread, versions, write_json, write_table

import moetune.models.catalog

MODELS = sorted(path.stem for path in (Path(moetune.models.catalog.__file__).parent / "models").glob("*.json"))
GPUS = ("15GiB", "24GiB", "44GiB", "80GiB")
LENGTH = 1024


def plan(model: str, gpu: str, goal: str, count: int, cache: str, limit: float) -> dict[str, Any]:
    """Run a plan once; return its seconds, what it recommends and its exit status (-9: it ran into the limit)."""
    words = [sys.executable, "-m", "moetune", "plan", model, "--gpu", gpu, "--count", str(count)]
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
    best = [" ".join(line.split()[1:]) for line in out.splitlines() if line.startswith((" 1 ", " 2 ", " 3 "))]
    return {"wall": wall, "cpu": cpu, "status": status, "best": best}


def loop() -> float:
    """Return the CPU seconds of twenty million additions."""
    start, total = time.process_time(), 0
    for number in range(20_000_000):
        total += number
    return time.process_time() - start


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table: wall seconds on each card, then the slowest plans."""
    plans = [one for one in report["plans"] if one["cold"]["status"] in (0, 1)]
    yield "| cards | goals | plans | from an empty cache, least, median, most | again |"
    yield "|---|---|---:|---:|---:|"
    for count, gpu in product((1, 2), GPUS):
        for goals in ("all", "one"):
            rows = [
                one for one in plans
                if (one["count"], one["gpu"]) == (count, gpu) and (one["goal"] == "all") is (goals == "all")
            ]  # fmt: skip
            if rows:
                cold, again = (spread(row[kind]["wall"] for row in rows) for kind in ("cold", "warm"))
                yield f"| {count} × {gpu} | {goals} | {len(rows)} | {cold} | {again} |"
    slowest = sorted(plans, key=lambda one: -one["cold"]["wall"])[:5]
    yield "\nThe slowest: " + "; ".join(
        f"{one['model']}, {one['goal']}, {one['count']} × {one['gpu']}: {one['cold']['wall']:.0f} s" for one in slowest
    ) + "."  # fmt: skip
    commits = Counter(one["commit"][:8] for one in report["plans"])
    made = f"{len(report['plans'])} plans of {len({one['model'] for one in plans})} models"
    listed = ", ".join(f"{name} ({count})" for name, count in commits.most_common())
    yield f"\n{made}; {report['cpu']}, {report['cores']} cores; commits {listed}."
    ended = {-9: "not ended", 2: "refused"}
    if others := [one for one in report["plans"] if one not in plans]:
        yield "\nNot counted: " + "; ".join(
            f"{one['model']}, {one['goal']}, {one['count']} × {one['gpu']} "
            f"({ended.get(one['cold']['status'], one['cold']['status'])})" for one in others
        ) + "."  # fmt: skip
    missing = [model for model in MODELS if all(model != one["model"] for one in report["plans"])]
    if missing:
        yield f"\nNot measured: {', '.join(missing)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="catalog names; all by default")
    parser.add_argument("--gpu", nargs="+", default=GPUS)
    parser.add_argument("--goal", nargs="+", default=["all", "router", "experts", "lora"])
    parser.add_argument("--count", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--limit", type=float, default=600, help="seconds of wall time after which a plan is ended")
    parser.add_argument("--json", type=Path, required=True, help="what was measured; is added to")
    parser.add_argument("--page", type=Path, help="a page whose table is written anew")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "versions": versions("moetune", "torch", "transformers"),
        "plans": [],
    }
    if options.json.exists():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    if options.page is not None:
        write_table(table(report), options.page)
        return
    known = {(one["model"], one["count"], one["gpu"], one["goal"]) for one in report["plans"]}
    for model, count, gpu, goal in product(options.models, options.count, options.gpu, options.goal):
        if (model, count, gpu, goal) in known:
            continue
        load, seconds = os.getloadavg()[0], loop()
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (plan(model, gpu, goal, count, cache, options.limit) for _ in range(2))
        about = {"model": model, "gpu": gpu, "goal": goal, "count": count, "commit": commit()}
        about |= {"load": load, "loop": seconds}
        report["plans"].append(about | {"cold": cold, "warm": warm})
        write_json(report, options.json)
        print(f"{model}, {goal}, {count} × {gpu}: {cold} {warm}", flush=True)


if __name__ == "__main__":
    main()
