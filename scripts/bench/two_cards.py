"""Writes the table of docs/guides/parallel.md that compares layouts of two models on two cards over PCIe 4.0.

python scripts/bench/two_cards.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moetune.config.load import read_run_config
from moetune.errors import UserError
from moetune.memory.assumed_routing import BALANCED
from moetune.planning.predict import predict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "parallel.md"
HEADER = "| model | layout | needs of the fullest card | sends a step | modelled tokens/s |"
LAYOUTS: dict[str, dict[str, Any]] = {
    "`{pp: 2}`": {"pp": 2},
    "`{pp: 2, schedule: interleaved1f1b}`": {"pp": 2, "schedule": "interleaved1f1b"},
    "`{fsdp: 2, ep: 2}`": {"fsdp": 2, "ep": 2},
    "`{fsdp: 2}`": {"fsdp": 2},
}


def row(model: str, layout: str, parallel: dict[str, Any]) -> str:
    """LoRA of rank 16 on attention and experts over 4 bits, and 8 × 2,048 tokens a step in every layout."""
    run = {
        "model": {"path": model, "base": "nf4"},
        "adapt": {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}},
        "optimizer": {"name": "adamw8bit"},
        "train": {"accumulate": 8 if "pp" in parallel else 4, "sequence_length": 2048, "checkpointing": "full"},
        "parallel": parallel,
        "hardware": {"gpu": "rtx-3090", "count": 2},
    }
    report = predict(read_run_config(run, (), layout), routing=BALANCED, advise=False)
    assert report.time is not None
    sent, speed = max(rank.sent for rank in report.ranks), report.time.tokens_per_second
    fits = "" if report.fits else ": does not fit"
    return (
        f"| {model} | {layout} | {report.required / 2**30:.1f} GiB{fits} | {sent / 2**30:.2f} GiB "
        f"| {speed.slow:,.0f} to {speed.fast:,.0f} |"
    )


def main() -> None:
    rows = []
    for model in ("mixtral-8x7b", "qwen3.5-35b-a3b"):
        for layout, parallel in LAYOUTS.items():
            try:
                rows.append(row(model, layout, parallel))
            except UserError as error:
                rows.append(f"| {model} | {layout} | refused: {error} | | |")
            print(rows[-1], file=sys.stderr, flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEADER)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(before + "\n".join([HEADER, "|---|---|---|---|---|", *rows]) + "\n\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
