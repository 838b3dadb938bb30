"""What of a LoRA survives `export --into`: tiny-mixtral, published in 16 bits, FP8, NVFP4 or INT4.

    python scripts/bench/merge_into.py --json docs/benchmarks/merge_into.json

LoRA of rank 16 on attention and all experts, on Unicode names, which the model has not learned, with two learning
rates: small changes, and large ones; trained as usual, and with `train.merge_into`. The published bases are
tiny-mixtral itself, rounded by `export --into` before any training. Losses are of held-out documents, in float32.
Prints the table of docs/benchmarks/merge_into.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from _common import commit, cpu_name, versions, write_json
from choosing_experts import QUIET, held_out_file

from moetune.adapt.build import build
from moetune.config.schema import RunConfig
from moetune.exporting.export import export
from moetune.inference.check import check_export
from moetune.inference.evaluate import evaluate
from moetune.inference.opened import open_model
from moetune.run.resolve import resolve
from moetune.watch import memory_record
from moetune.watch.train import train

CASES = (
    ("bf16", "fp8", False), ("bf16", "nvfp4", False), ("fp8", "fp8", False), ("nvfp4", "nvfp4", False),
    ("int4", "int4", False), ("fp8", "fp8", True), ("nvfp4", "nvfp4", True),
    ("int4", "int4", True),
)  # fmt: skip
"""(format of the base, format of the export, whether training rounds to it: `train.merge_into`)."""
RATES = (1.0e-5, 3.0e-4)


def run_config(
    path: str, rate: float, steps: int, held_out: Path, output: Path, merge_into: str | None = None
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": path, "dtype": "fp32", "base": "fp32" if path == "tiny-mixtral" else "auto"},
            "adapt": {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}},
            "optimizer": {"name": "adamw", "lr": rate},
            "train": {
                "micro_batch": 4, "accumulate": 1, "sequence_length": 256, "steps": steps, "eval_every": steps,
                "save_every": steps, "merge_into": merge_into,
            },
            "data": {"train": "unicode-names", "eval": str(held_out)},
            "output": str(output),
        }
    )  # fmt: skip


def measured(
    base: str, formats: list[str], rounds: bool, rate: float, steps: int, folder: Path, held_out: Path
) -> list[dict[str, Any]]:
    """Train once, with `train.merge_into` if it `rounds` to the one format, and return a row for each format."""
    path, output = "tiny-mixtral", folder / f"{base}-{rate}-{rounds}"
    if base != "bf16":
        path = str(folder / base)
        if not Path(path).exists():
            untrained = build(resolve(run_config("tiny-mixtral", rate, steps, held_out, output), "cpu"), "cpu")
            export(untrained, "merged", path, into=base)  # type: ignore[arg-type]
    config = run_config(path, rate, steps, held_out, output, formats[0] if rounds else None)
    with patch.object(memory_record, "predicted", lambda *_: memory_record.Predicted()):  # longer than the training
        train(resolve(config, "cpu"), device="cpu", console=QUIET)
    before = evaluate(open_model(path, dtype="fp32"), str(held_out), 256).loss
    export(output, "merged", folder / f"{output.name}-merged")
    merged = check_export(output, folder / f"{output.name}-merged", rounded=True)
    rows = []
    for into in formats:
        out = folder / f"{output.name}-{into}"
        survival = export(output, "merged", out, into=into).survival  # type: ignore[arg-type]
        checked = check_export(output, out, rounded=True)
        assert checked is not None
        assert merged is not None
        rows.append(
            {
                "base": base, "into": into, "rounds": rounds, "rate": rate, "kept": survival[-1].kept,
                "error": survival[-1].error,
                "layers": [[one.layer, one.kept, one.error] for one in survival[:-1]],
                "before": before, "adapter": checked.trained_loss, "merged": merged.exported_loss,
                "rounded": checked.exported_loss,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report: dict[str, Any] = {"schema": 1, "commit": commit(), "device": cpu_name()}
    report |= {"versions": versions("torch", "moetune"), "steps": given.steps, "runs": []}
    if given.json.exists():  # what was begun with the same steps goes on
        begun = json.loads(given.json.read_text(encoding="utf-8"))
        report = begun if begun["steps"] == given.steps else report
    rows = report["runs"]
    with tempfile.TemporaryDirectory() as folder:
        held_out = held_out_file(Path(folder))
        for rate, (base, rounds) in product(RATES, dict.fromkeys((base, rounds) for base, _, rounds in CASES)):
            if not any((row["rate"], row["base"], row["rounds"]) == (rate, base, rounds) for row in rows):
                formats = [
                    into for *case, into in ((one, how, into) for one, into, how in CASES) if case == [base, rounds]
                ]
                rows += measured(base, formats, rounds, rate, given.steps, Path(folder), held_out)
                write_json(report, given.json)
    for row in rows:
        losses = " | ".join(f"{row[key]:.4f}" for key in ("before", "adapter", "merged", "rounded"))
        how = row["base"], row["into"], "yes" if row["rounds"] else "no", f"{row['rate']:g}"
        print(f"| {' | '.join(how)} | {row['kept']:.2f} | {row['error']:.2f} | {losses} |")


if __name__ == "__main__":
    main()
