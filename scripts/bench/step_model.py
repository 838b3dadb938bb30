"""The model of a step: operations, bytes and launches by part, counted by a trace, and what they imply for a card.

    python scripts/bench/step_model.py --json docs/benchmarks/step_model.json --page docs/benchmarks/step_model.md

Nothing here was run on a GPU: counts are exact for the step that is trained, times are the roofline's
(docs/concepts/time.md). A case takes ten seconds to a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _common import commit, versions, write_json

from moetune.config.schema import RunConfig
from moetune.memory.predict import time_of
from moetune.memory.time.roofline import Duration
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.report.units import between, named
from moetune.run.resolve import resolve

LORA = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}}
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {  # model, adapt, rows, tokens of a row
    "Mixtral-8x7B, routers": ("mixtral-8x7b", {"router": "all"}, 4, 2048),
    "Mixtral-8x7B, LoRA r16": ("mixtral-8x7b", LORA, 4, 2048),
    "Qwen3-30B-A3B, LoRA r16": ("qwen3-30b-a3b", LORA, 8, 2048),
    "OLMoE-1B-7B, LoRA r16": ("olmoe-1b-7b", LORA, 8, 2048),
}
CARDS = ("h100", "a6000", "l40s")


_HEAD = """# The model of a step

Modelled, not measured: operations, bytes and launches are counted by a trace of the step that is trained, one
micro-step and an update of 8-bit AdamW; times are those of the [roofline](../concepts/time.md), from its fast end to
its slow one. Made by `scripts/bench/step_model.py`; every number is in [step_model.json](step_model.json)."""
_CARDS_HEADING = "| card | tokens/s | seconds a step | share of its TFLOP/s | most of the time, slow end |"


def duration_of(case: str, gpu: str) -> Duration:
    model, adapt, rows, length = CASES[case]
    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "adapt": adapt,
            "optimizer": {"name": "adamw8bit"},
            "train": {"micro_batch": rows, "accumulate": 1, "sequence_length": length},
        }
    )
    card = find_gpu(gpu)
    found = time_of(config, trace(resolve(config, "cuda"), gpu=card), card)
    assert found is not None
    return found


def page(found: dict[str, dict[str, Duration]]) -> str:
    lines = [_HEAD]
    for case, cards in found.items():
        _, _, rows, length = CASES[case]
        first = next(iter(cards.values()))
        lines += [
            "",
            f"## {case}, {rows} × {length:,} tokens",
            "",
            f"| part, as on {find_gpu(CARDS[0]).full_name} | TFLOP | of them float32 | GB | launches | waits |",
            "|---|---|---|---|---|---|",
        ]
        for part, work in sorted(first.work.items(), key=lambda item: -item[1].flops - item[1].bytes):
            size = (work.bytes + work.product_bytes + work.copied) / 1e9
            lines.append(
                f"| {named(part)} | {(work.flops + work.flops32) / 1e12:,.2f} | {work.flops32 / 1e12:,.2f} | "
                f"{size:,.1f} "
                f"| {work.launches:,.0f} | {work.synchronizations:,.0f} |"
            )
        lines += [
            "",
            "| card | tokens/s | seconds a step | share of its TFLOP/s | most of the time, slow end |",
            "|---|---|---|---|---|",
        ]
        for gpu, time in cards.items():
            most = sorted(time.parts.items(), key=lambda item: -item[1].slow)[:3]
            shares = ", ".join(f"{named(part)} {seconds.slow / time.seconds.slow:.0%}" for part, seconds in most)
            lines.append(
                f"| {find_gpu(gpu).full_name} | {between(time.tokens_per_second)} | {between(time.seconds)} "
                f"| {time.share.slow:.0%} to {time.share.fast:.0%} | {shares} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    found = {case: {gpu: duration_of(case, gpu) for gpu in CARDS} for case in given.cases}
    print(page(found))
    if given.page is not None:
        given.page.write_text(page(found), encoding="utf-8")
    if given.json is not None:
        cases = {case: {gpu: time.to_json() for gpu, time in cards.items()} for case, cards in found.items()}
        report = {
            "schema": 1,
            "modelled": True,
            "commit": commit(),
            "versions": versions("torch", "transformers", "moetune"),
        }
        write_json({**report, "cases": cases}, given.json)


if __name__ == "__main__":
    main()
