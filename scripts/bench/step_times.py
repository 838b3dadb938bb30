"""The time of a step, estimated beside measured: the fit of the constants in moetune/memory/time/estimate.py.

    python scripts/bench/step_times.py              the table of docs/concepts/time.md, and the fitted constants
    python scripts/bench/step_times.py --trace      the work of each point anew, by tracing it; writes the file

Points are in docs/benchmarks/step_times.json: a configuration, the card, the seconds that it took there, where they are
from, and the work of the step (or of the micro-step, without the `update`), as a trace counts it. The constants are
those whose logarithms of estimated over measured seconds have the least sum of squares; each point is also estimated
with constants fitted to the others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import ROOT, write_json

from moetune.config.schema import RunConfig
from moetune.memory.time.estimate import SPREAD, duration
from moetune.memory.time.work import Work
from moetune.memory.trace import trace
from moetune.models.catalog import find_model
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve

FILE = ROOT / "docs/benchmarks/step_times.json"
LORA = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}}
COSTS = np.geomspace(5e-6, 500e-6, 461)
"""Seconds of a launch that are tried, 1 % apart."""


def points() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["points"]


def traced(point: dict[str, Any]) -> dict[str, int]:
    """Trace a point's step; return its work, without that of an update that was not timed."""
    entry = find_model(point["model"])
    assert entry is not None
    config = entry.config | ({"num_hidden_layers": point["layers"]} if "layers" in point else {})
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        run = RunConfig.model_validate(
            {
                "model": {"path": folder, "weights": "random", "dtype": "bf16"},
                "adapt": point.get("adapt", LORA),
                "optimizer": {"name": "adamw8bit"},
                "train": point["train"],
            }
        )
        work = trace(resolve(run, "cuda"), gpu=find_gpu(point["card"])).work
    counted = (done for part, done in work.items() if point["update"] or part != "optimizer")
    return sum(counted, Work()).to_json()


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


def fitted(points: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the seconds of a launch by torch and by Python that fit the points best."""
    measured, computing, by_torch, own = np.array([numbers(point) for point in points]).T
    launch, own_launch = COSTS[:, None, None], COSTS[None, :, None]
    off = np.log(np.maximum(computing, by_torch * launch + own * own_launch) / measured)
    best = np.unravel_index((off**2).sum(-1).argmin(), off.shape[:2])
    return float(COSTS[best[0]]), float(COSTS[best[1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="count the work of each point anew")
    found = points()
    if parser.parse_args().trace:
        found = [point | {"work": traced(point)} for point in found]
        write_json({"schema": 1, "points": found}, FILE)
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
