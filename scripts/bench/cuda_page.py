"""Writes docs/benchmarks/predict_vs_measured_cuda.md from what predict_vs_measured.py measured on CUDA.

    python scripts/bench/cuda_page.py docs/benchmarks/predict_vs_measured_cuda_*.json

Each file is one device; cases of files of the same device stand in one table. What the page has after `BY_HAND` stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from _common import ROOT
from predict_vs_measured import CUDA_CASES, GiB, off, size, verdict

PAGE = ROOT / "docs/benchmarks/predict_vs_measured_cuda.md"
BY_HAND = "\n<!-- by hand -->\n"
HEAD = """# Peak memory on CUDA, predicted beside measured

    python scripts/bench/predict_vs_measured.py --device cuda --json FILE.json
    python scripts/bench/cuda_page.py FILE.json...

Models at full size with random weights. A case is a run file: a recipe of `configs/` or a catalog model, as
`scripts/bench/predict_vs_measured.py` has them. `allocated` and `reserved` are the peaks that torch's caching allocator
counted, beside those of `moetune predict`.
"""
NULL_DEVICE = """
## What these numbers are not

**No GPU has computed them.** They come from a CUDA build of torch on a device that answers every call and computes
nothing (`tests/nullcuda/device.c`, `scripts/test_cuda.sh`). All host code is real: torch's caching allocator, its
choice of kernels, streams, autograd's threads, bitsandbytes. So allocated and reserved memory are those of a process on
a GPU, except for

- **cuDNN's attention**, which torch prefers on an H100, and which needs a card. It is switched off here, so torch takes
  the efficient or the flash kernel.
- **cuBLAS's choices**: products take no workspace beyond those that torch gives them.
- **Memory outside the allocator**: the CUDA context, loaded kernels, NCCL's buffers. So there is no `process`.
- **Times**, and every **value**. Routing is balanced: all experts receive as many tokens.

The card is assumed to have 80 GiB, whatever its capability. Equal micro-steps after the second are left out.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="JSON of predict_vs_measured.py --device cuda")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in options.files]
    _, mark, kept = options.out.read_text(encoding="utf-8").partition(BY_HAND) if options.out.exists() else ("",) * 3
    options.out.write_text("\n".join(page(reports)) + "\n" + mark + kept, encoding="utf-8")


def page(reports: list[dict[str, Any]]) -> Iterator[str]:
    yield HEAD.rstrip()
    if any(report["null_device"] for report in reports):
        yield NULL_DEVICE.rstrip()
    by_device: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        by_device.setdefault(heading(report), []).append(report)
    for title, of_device in sorted(by_device.items()):
        first = of_device[0]
        used = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if name != "moetune")
        rows = {row["case"]: row for report in of_device for row in report["cases"]}
        commits = ", ".join(sorted({short(row["commit"]) for row in rows.values()}))
        again = ", ".join(sorted({short(row["predicted_by"]) for row in rows.values() if "predicted_by" in row}))
        commits += f" (predictions {again})" if again else ""
        yield f"\n## {title}\n\nCommit {commits}; {used}.\n"
        yield from table((rows[name] for name in CUDA_CASES if name in rows), on_null=first["null_device"])
        ran = [row for row in rows.values() if row.get("measured")]
        if ran:
            yield f"\nPredictions are off by: {'; '.join(farthest(kind, ran) for kind in ('allocated', 'reserved'))}."


def farthest(kind: str, rows: list[dict[str, Any]]) -> str:
    """Between which errors the predictions of a kind of bytes lie."""
    pairs = [(row["predicted"][kind], row["measured"][kind]) for row in rows]
    low, high = (end(pairs, key=lambda pair: pair[0] / pair[1]) for end in (min, max))
    return f"{kind} {off(*low)} to {off(*high)}"


def short(commit: str | None) -> str:
    """A commit's name; `+` follows where there were changes."""
    return "unknown" if commit is None else commit[:12] + "+" * commit.endswith("+")


def heading(report: dict[str, Any]) -> str:
    card = report["device"]
    capability = ".".join(map(str, card["capability"]))
    return f"Capability {capability}, as {card['name']}" if report["null_device"] else f"{card['name']} ({capability})"


def table(rows: Iterable[dict[str, Any]], *, on_null: bool) -> Iterator[str]:
    kinds = ("allocated", "reserved") if on_null else ("allocated", "reserved", "process")
    yield "| case |" + "".join(f" {kind}: measured | predicted, off by |" for kind in kinds) + " verdict |"
    yield "|---|" + "---:|" * (2 * len(kinds)) + "---|"
    for row in rows:
        cells = [row["case"]]
        for kind in kinds:
            predicted, measured = ((row.get(side) or {}).get(kind) for side in ("predicted", "measured"))
            cells += [size(measured, GiB), off(predicted, measured)]
        yield f"| {' | '.join([*cells, verdict(row)])} |"


if __name__ == "__main__":
    main()
