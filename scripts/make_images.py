"""Makes docs/images/: the pictures of README, and figures.json with their data, which a test makes again.

python scripts/make_images.py [NAME…]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from moetune.config.load import load_run_config
from moetune.memory.report import MemoryReport
from moetune.planning.figure import plan_chart
from moetune.planning.plan import Plan, plan
from moetune.planning.predict import predict
from moetune.report.memory import verdict
from moetune.report.memory_charts import memory_chart

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RUNS = {
    "report.png": ("mixtral-8x7b-lora", "44GiB"),
    "mixtral-8x22b-lora-host": ("mixtral-8x22b-lora-host", "12GiB"),
}


def predicted(name: str, gpu: str) -> MemoryReport:
    return predict(load_run_config(ROOT / "configs" / f"{name}.yaml"), gpu=gpu)


def planned() -> Plan:
    return plan("mixtral-8x7b", "44GiB", tokens=10_000_000, processes=2)


def of_report(report: MemoryReport) -> dict[str, Any]:
    fullest = report.fullest
    parts = {**dict(fullest.parts.items()), "reserved": fullest.peak_reserved, "host": fullest.host_bytes}
    return {"verdict": verdict(report), **parts, "loading": report.load.gpu}


def of_plan(plan: Plan) -> list[dict[str, Any]]:
    return [
        {"trains": one.trains, "required": one.report.required, "weights": one.report.fullest.parts.trainable_weights}
        for one in plan.candidates
    ]


def made(name: str, draw: bool) -> Any:
    """Predict what one entry of figures.json states, and draw its picture if it has one."""
    if name == "plan.png":
        found = planned()
        if draw:
            plan_chart(found).save(IMAGES / name)
        return of_plan(found)
    report = predicted(*RUNS[name])
    if draw and name.endswith(".png"):
        memory_chart(report).save(IMAGES / name)
    return of_report(report)


def main() -> None:
    file = IMAGES / "figures.json"
    figures = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in sys.argv[1:] or [*RUNS, "plan.png"]:
        figures[name] = made(name, draw=True)
        file.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
