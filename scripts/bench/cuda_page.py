"""Writes the table of docs/benchmarks/predict_vs_measured_cuda.md from what predict_vs_measured.py measured on CUDA.

    python scripts/bench/cuda_page.py docs/benchmarks/predict_vs_measured_cuda_*.json

Cases of files of the same device are counted together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _common import ROOT, write_table
from predict_vs_measured import GiB, is_wrong, off, size

PAGE = ROOT / "docs/benchmarks/predict_vs_measured_cuda.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="JSON of predict_vs_measured.py --device cuda")
    options = parser.parse_args()
    write_table(table([json.loads(file.read_text(encoding="utf-8")) for file in options.files]), PAGE)


def table(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page's table: of each device, between which errors the predictions lie."""
    ran = [row for report in reports for row in report["cases"] if row.get("measured")]
    inside, count, width = coverage(ran)
    yield f"**In their range: {inside} of {count} runs** that have one, of {len(ran)}; its median width: {width}.\n"
    by_device: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        by_device.setdefault(heading(report), []).append(report)
    heads = (
        "allocated: measured",
        "off by",
        "reserved: off by",
        "in the range",
        "its width",
        "wrong verdicts",
        "commits",
    )
    yield f"| device | cases | {' | '.join(heads)} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    for title, of_device in sorted(by_device.items()):
        rows = [*{row["case"]: row for report in of_device for row in report["cases"]}.values()]
        ran = [row for row in rows if row.get("measured")]
        sizes = sorted(row["measured"]["allocated"] for row in ran)
        commits = ", ".join(sorted({short(row.get("predicted_by", row["commit"])) for row in rows}))
        inside, count, width = coverage(ran)
        cells = (
            title, len(rows), f"{size(sizes[0], GiB)} to {size(sizes[-1], GiB)}", farthest("allocated", ran),
            farthest("reserved", ran), f"{inside} of {count}", width, sum(map(is_wrong, rows)), commits,
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    used = reports[0]["versions"].items()
    yield f"\n{', '.join(f'{name} {version}' for name, version in used if name != 'moetune')}."


def farthest(kind: str, rows: list[dict[str, Any]]) -> str:
    """Between which errors the predictions of a kind of bytes lie."""
    pairs = [(row["predicted"][kind], row["measured"][kind]) for row in rows]
    low, high = (end(pairs, key=lambda pair: pair[0] / pair[1]) for end in (min, max))
    return f"{off(*low)} to {off(*high)}"


def coverage(rows: list[dict[str, Any]]) -> tuple[int, int, str]:
    """How many runs needed between the low and the high end of what was predicted, of how many that have a range; its
    median width."""
    ranges = [(row["predicted"], row["measured"]["allocated"]) for row in rows if "low" in row["predicted"]]
    inside = sum(
        said["low"] <= max(allocated + said["process"] - said["reserved"], loading(said)) <= said["high"]
        for said, allocated in ranges
    )
    width = median(100 * (said["high"] - said["low"]) / said["process"] for said, _ in ranges)
    return inside, len(ranges), f"{width:.1f} %"


def loading(predicted: dict[str, int]) -> int:
    """Bytes that loading takes where that is more than a step; it was not measured."""
    return predicted["with_loading"] if predicted["with_loading"] > predicted["process"] else 0


def short(commit: str | None) -> str:
    """A commit's name; `+` follows where there were changes."""
    return "unknown" if commit is None else commit[:12] + "+" * commit.endswith("+")


def heading(report: dict[str, Any]) -> str:
    card = report["device"]
    capability = ".".join(map(str, card["capability"]))
    return f"Capability {capability}, as {card['name']}" if report["null_device"] else f"{card['name']} ({capability})"


if __name__ == "__main__":
    main()
