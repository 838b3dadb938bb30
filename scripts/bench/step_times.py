"""The time of a step, estimated beside measured: the fit of the constants in moetune/memory/time/estimate.py.

    python scripts/bench/step_times.py              the table of docs/concepts/time.md, and the fitted constants
    python scripts/bench/step_times.py --trace      the work of each point anew, by tracing it; writes the file
    python scripts/bench/step_times.py --link TREE  bytes between host and card (docs/concepts/offload.md), predicted by
                                                    this tree and by others, such as one of 7e9c7804

Points are in docs/benchmarks/step_times.json: a configuration, the card, the seconds that it took there, where they are
from, and the work of the step (or of the micro-step, without the `update`), as a trace counts it. Under `hosts` are the
seconds that a host took for micro-steps on a device that computes nothing: from these follows how much more a launch by
Python costs than one by torch. What both cost beside a card is fitted to the points: the logarithms of estimated over
measured seconds have the least sum of squares. Each point is also estimated with the constant fitted to the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, lora_run, write_json

from moetune.memory.time.estimate import SPREAD, duration
from moetune.memory.time.work import Work
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve

FILE = ROOT / "docs/benchmarks/step_times.json"
COSTS = np.geomspace(5e-6, 500e-6, 461)
"""Seconds of a launch that are tried, 1 % apart."""


def points(which: str = "points") -> list[dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))[which]


def traced(point: dict[str, Any]) -> dict[str, int]:
    """Trace a point's step; return its work, without that of an update that was not timed."""
    with tempfile.TemporaryDirectory() as folder:
        adapt = {"adapt": point["adapt"]} if "adapt" in point else {}
        run = lora_run(Path(folder), point["model"], point.get("layers"), point["train"], **adapt)
        work = trace(resolve(run, "cuda"), gpu=find_gpu(point["card"])).work
    counted = (done for part, done in work.items() if point["update"] or part != "optimizer")
    return sum(counted, Work()).to_json()


def print_the_link(trees: Sequence[Path]) -> None:
    """Print, for each tree, the bytes that a step of eight micro-batches of Mixtral-8x22B copies between host and card,
    its experts in host memory, as `moetune predict` of that tree counts them.

    First each tree's own `configs/mixtral-8x22b-lora-host.yaml`, as it stands; then with other rows and
    `checkpointing`.
    """
    print("| rows of 2,048 | checkpointing | tree | GB over the link a step | process, GiB | pinned, GiB |")
    print("|---:|---|---|---:|---:|---:|")
    ways = (4, "as it stands"), (4, "offload"), (1, "offload"), (1, "full")
    for (rows, kept), tree in product(ways, trees):
        recipe, sets = str(tree / "configs/mixtral-8x22b-lora-host.yaml"), ["accumulate=8"]
        if kept != "as it stands":
            sets += ["expert_memory=256MiB", f"micro_batch={rows}", f"checkpointing={kept}"]
        words = [sys.executable, "-m", "moetune", "predict", recipe, "--json", *(f"--set=train.{one}" for one in sets)]
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"PYTHONPATH": str(tree), "MOETUNE_CACHE": cache}
            made = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, check=True).stdout
        report = json.loads(made)
        copied, rank = report["time"]["work"]["transfers"]["copied"], report["ranks"][0]
        memory = f"{rank['peak_process'] / 2**30:.2f} | {rank['host_bytes'] / 2**30:.2f}"
        print(f"| {rows} | {kept} | {tree.name} | {copied / 1e9:,.1f} | {memory} |", flush=True)


def numbers(point: dict[str, Any]) -> tuple[float, float, float, float]:
    """Return the seconds that were measured and that the card computes, launches by torch and by Python."""
    work = Work(**point["work"])
    estimate = duration({"rest": work}, point["tokens"], find_gpu(point["card"]))
    assert estimate is not None
    computing = estimate.parts["rest"].fast / SPREAD.fast
    return point["seconds"], computing, work.launches - work.own_launches, work.own_launches


def estimated(point: dict[str, Any], launch: float, own_launch: float) -> float:
    _, computing, by_torch, own = numbers(point)
    return max(computing, by_torch * launch + own * own_launch)


def launch_ratio() -> float:
    """Return how many launches by torch cost the host as much as one by Python, on a device that computes nothing."""
    measured, _, by_torch, own = np.array([numbers(host) for host in points("hosts")]).T
    launches = np.stack([by_torch, own], axis=1) / measured[:, None]
    (launch, own_launch), *_ = np.linalg.lstsq(launches, np.ones(len(measured)), rcond=None)
    return float(own_launch / launch)


def fitted(points: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the seconds of a launch by torch and by Python that fit the points best."""
    ratio = launch_ratio()
    measured, computing, by_torch, own = np.array([numbers(point) for point in points]).T
    off = np.log(np.maximum(computing, (by_torch / ratio + own) * COSTS[:, None]) / measured)
    best = float(COSTS[(off**2).sum(axis=1).argmin()])
    return best / ratio, best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="count the work of each point anew")
    parser.add_argument("--link", nargs="*", type=Path, metavar="TREE", help="count what crosses the link to the host")
    options = parser.parse_args()
    if options.link is not None:
        print_the_link([*(tree.resolve() for tree in options.link), ROOT])
        return
    if options.trace:
        counted = {key: [point | {"work": traced(point)} for point in points(key)] for key in ("hosts", "points")}
        write_json({"schema": 1, **counted}, FILE)
    found = points()
    launch, own_launch = fitted(found)
    print(f"a launch by torch {1e6 * launch:.1f} µs, by Python {1e6 * own_launch:.1f} µs\n")
    print("| step | card | measured | estimated | range | measured / estimated | when left out of the fit |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for point in found:
        name, seconds, card = point["name"], point["seconds"], point["card"].partition("-")[0].upper()
        taken = estimated(point, launch, own_launch)
        others = estimated(point, *fitted([other for other in found if other is not point]))
        ends = f"{taken * SPREAD.fast:.2f} to {taken * SPREAD.slow:.2f}"
        ratios = f"{seconds / taken:.2f} | {seconds / others:.2f}"
        print(f"| {name} | {card} | {seconds:.3f} | {taken:.3f} | {ends} | {ratios} |")


if __name__ == "__main__":
    main()
