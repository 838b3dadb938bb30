"""The model of a step: operations, bytes and launches by part, counted by a trace, and what they imply for a card.

    python scripts/bench/step_model.py --json docs/benchmarks/step_model.json --page docs/benchmarks/step_model.md

Nothing here was run on a GPU: counts are exact for the step that is trained, times are the roofline's
(docs/concepts/time.md). A case takes ten seconds to a minute.

Counts of commit 7f6aafb, before kernels were joined and rows kept, stay in the JSON file. `--before FOLDER` counts them
again by the code of a checkout of that commit; occupancy, which it did not know, by that of today.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from _common import ROOT, commit, versions, write_json

from moetune.config.schema import RunConfig
from moetune.memory.assumed_routing import UNKNOWN
from moetune.memory.keep.settle import settled
from moetune.memory.predict import quick, time_of
from moetune.memory.time.roofline import Duration, duration
from moetune.memory.time.work import Work
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

STEP = 8  # rows of 2,048 tokens of the steps that are compared
COMPARED_CARDS = ("a6000", "h100")
TITLES = {"mixtral-8x7b": "Mixtral-8x7B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
AUTO = {"checkpointing": "auto"}
COMPARED: dict[
    str, dict[str, tuple[int, str | None, dict[str, Any]]]
] = {  # model -> what -> rows at once, memory, train
    "mixtral-8x7b": {
        "after, no rows kept": (8, None, {}),
        "`keep_rows: auto` in 44 GiB": (8, "44GiB", {"keep_rows": "auto"}),
        "`checkpointing: auto` in 44 GiB": (8, "44GiB", AUTO),
        "4 micro-batches of 2 × 2,048, `checkpointing: auto` in 44 GiB": (2, "44GiB", AUTO),
        "4 micro-batches of 2 × 2,048, `checkpointing: auto` in 44 GiB, `expert_memory: 2GiB`": (
            2,
            "44GiB",
            {**AUTO, "expert_memory": "2GiB"},
        ),
        "`checkpointing: auto` in the card's own memory": (8, None, AUTO),
    },
    "qwen3-30b-a3b": {
        "after, no rows kept": (8, None, {}),
        "`keep_rows: auto` in 44 GiB": (8, "44GiB", {"keep_rows": "auto"}),
        "`checkpointing: auto` in 44 GiB": (8, "44GiB", AUTO),
        "`checkpointing: auto` in 44 GiB, `expert_memory: 1GiB`": (8, "44GiB", {**AUTO, "expert_memory": "1GiB"}),
    },
}
BEST = {"mixtral-8x7b": 4, "qwen3-30b-a3b": 3}
"""The row that is shown part by part."""

_HEAD = """# The model of a step

Modelled, not measured: operations, bytes and launches are counted by a trace of the step that is trained, one
micro-step and an update of 8-bit AdamW; times are those of the [roofline](../concepts/time.md), from its fast end to
its slow one. Made by `scripts/bench/step_model.py`; every number is in [step_model.json](step_model.json)."""

_COMPARED = """
## Before and after

LoRA r16 on attention and experts on an NF4 base, full checkpointing, steps of 8 × 2,048 tokens, on one roofline. Before
is commit {commit}. `auto` chooses [what layers keep](../concepts/activations.md#what-else-fits) in the memory that is
given; all other settings are the defaults. Layers is how many keep rows; peaks are those of the traces, in GiB. The
slow end knows [occupancy](../concepts/time.md#the-roofline); at the fast end a multiprocessor without a tile of a
product loses nothing."""

_PARTS = """
{title} on {card}, seconds by part:

| part | before | after | TFLOP that idle multiprocessors could do, before | after | launches before | after |
|---|---|---|---:|---:|---:|---:|"""


def settings(model: str, adapt: dict[str, Any], rows: int, length: int, **train: Any) -> dict[str, Any]:
    """Of a run file."""
    return {
        "model": {"path": model},
        "adapt": adapt,
        "optimizer": {"name": "adamw8bit"},
        "train": {"micro_batch": rows, "accumulate": 1, "sequence_length": length} | train,
    }


def duration_of(case: str, gpu: str) -> Duration:
    config, card = RunConfig.model_validate(settings(*CASES[case], keep_rows="none")), find_gpu(gpu)
    found = time_of(config, trace(resolve(config, "cuda"), gpu=card), card)
    assert found is not None
    return found


# --- Before and after ---------------------------------------------------------------------------------------------

_COUNT_BEFORE = """
import importlib.util, json, sys
from moetune.catalog.gpus import find_gpu
from moetune.config import RunConfig
from moetune.memory.predict import time_of
from moetune.memory.trace import trace
from moetune.run.resolve import resolve
from moetune.timing import counter, work
spec = importlib.util.spec_from_file_location("occupancy", sys.argv[1])
occupancy = importlib.util.module_from_spec(spec)
sys.modules["occupancy"] = occupancy
spec.loader.exec_module(occupancy)
works = work.works
def idle(func, args, kwargs, out, capability):
    for share in works(func, args, kwargs, out, capability):
        lost = 0
        if share.work.flops:
            products = occupancy.products(func._opname, args, share.work.launches > 2)
            if func._opname == "gemm_4bit":
                rows, shape = args[0], args[2]
                count = rows.numel() // rows.shape[-1]
                products = [occupancy.Product([count], shape[0], [shape[1]], True)]
            lost = sum(occupancy.idle(one, int(sys.argv[2])) for one in products)
        yield share._replace(work=work.Work(flops=lost))
config, card = RunConfig.model_validate(json.loads(sys.argv[3])), find_gpu(sys.argv[4])
def count():
    traced = trace(resolve(config, "cuda"), gpu=card)
    return traced, {part: one.to_json() for part, one in time_of(config, traced, card).work.items()}
traced, counts = count()
counter.works = idle
for part, one in count()[1].items():
    counts[part]["idle"] = one["flops"]
print(json.dumps({"peak": traced.parts(traced.peak).total, "work": counts}))
"""


def counts_before(folder: Path) -> dict[str, Any]:
    """Count the compared steps by the code of a checkout of the commit before."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, Any] = {"commit": head.stdout.strip(), "cases": {}}
    for model in COMPARED:
        config = settings(model, LORA, STEP, 2048)
        found["cases"][model] = {}
        for gpu in COMPARED_CARDS:
            card = find_gpu(gpu)
            assert card.multiprocessors is not None
            occupancy = ROOT / "moetune/memory/time/occupancy.py"
            given = [str(occupancy), str(card.multiprocessors.value), json.dumps(config), gpu]
            paths = os.environ | {"PYTHONPATH": str(folder)}
            command = [sys.executable, "-c", _COUNT_BEFORE, *given]
            done = subprocess.run(command, cwd=folder, env=paths, capture_output=True, text=True, check=True)
            found["cases"][model][gpu] = json.loads(done.stdout)
    return found


def before(counts: dict[str, Any], model: str, gpu: str) -> dict[str, Any]:
    """One compared step of the commit before, on the roofline of today."""
    counted = counts["cases"][model][gpu]
    work: dict[Any, Work] = {part: Work(**numbers) for part, numbers in counted["work"].items()}
    time = duration(work, STEP * 2048, find_gpu(gpu), ())
    assert time is not None
    return {"layers": 0, "peak": counted["peak"], "time": time.to_json()}


def after(model: str, gpu: str, rows: int, memory: str | None, train: dict[str, Any]) -> dict[str, Any]:
    """One compared step; rows are kept in `memory`, by default the card's own."""
    train = {"accumulate": STEP // rows} | train
    run = resolve(RunConfig.model_validate(settings(model, LORA, rows, 2048, **train)), "cuda")
    card = find_gpu(gpu)
    room = card if memory is None else replace(card, memory=find_gpu(memory).memory)
    run = settled(run, room, UNKNOWN, lambda one: quick(one, gpu=room))
    traced = trace(run, gpu=card)
    time = time_of(run.config, traced, card)
    assert time is not None
    layers = len(run.keeps_rows)
    return {"layers": layers, "peak": traced.parts(traced.peak).total, "time": time.to_json()}


def compared(counts: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return model -> what -> card -> a step."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for model, steps in COMPARED.items():
        found[model] = {"before": {gpu: before(counts, model, gpu) for gpu in COMPARED_CARDS}}
        for what, step in steps.items():
            found[model][what] = {gpu: after(model, gpu, *step) for gpu in COMPARED_CARDS}
    return found


def table(steps: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Of the compared steps: seconds at both ends, and what they are less than before."""
    heads = [
        f"{gpu.upper()}: {head}" for gpu in COMPARED_CARDS for head in ("layers, peak", "s", "fast end", "slow end")
    ]
    lines = [
        "",
        f"| step | TFLOP (A6000) | launches (A6000; H100) | {' | '.join(heads)} |",
        f"|---|---:|---:|{'---|' * len(heads)}",
    ]
    for model, found in steps.items():
        for what, cards in found.items():
            first, cells = cards[COMPARED_CARDS[0]]["time"], []
            for gpu in COMPARED_CARDS:
                time, since = cards[gpu]["time"]["seconds_per_step"], found["before"][gpu]["time"]["seconds_per_step"]
                less = ["" if what == "before" else f"{time[end] / since[end] - 1:+.1%}" for end in ("fast", "slow")]
                layers = f"{cards[gpu]['layers']}, {cards[gpu]['peak'] / 2**30:.1f}"
                cells += [layers, f"{time['fast']:.2f} to {time['slow']:.1f}", *less]
            launches = "; ".join(
                f"{sum(work['launches'] for work in cards[gpu]['time']['work'].values()):,}" for gpu in COMPARED_CARDS
            )
            flops = first["flops_per_step"] / 1e12
            lines.append(f"| {TITLES[model]}, {what} | {flops:,.0f} | {launches} | {' | '.join(cells)} |")
    return lines


def less(found: dict[str, dict[str, Any]], what: str, end: str) -> str:
    """How much less time a step takes than before, on each card."""
    ends = ((found[one][gpu]["time"]["seconds_per_step"][end] for one in (what, "before")) for gpu in COMPARED_CARDS)
    return " and ".join(f"{1 - now / since:.1%}" for now, since in ends)


def summary(steps: dict[str, dict[str, dict[str, Any]]]) -> str:
    """What settings are worth: with rows kept alone, and with those of the best row."""
    sentences = []
    for model, found in steps.items():
        rows, auto, best = (list(COMPARED[model])[index] for index in (1, 2, BEST[model]))
        sentences.append(
            f"{TITLES[model]} takes {less(found, auto, 'slow')} less at the slow end by `checkpointing: auto` alone "
            f"({less(found, rows, 'slow')} by `keep_rows: auto` alone); with “{best}” {less(found, best, 'slow')}, at "
            f"the fast end {less(found, best, 'fast')}."
        )
    cards = " and ".join(find_gpu(gpu).full_name for gpu in COMPARED_CARDS)
    return f"On {cards}: {' '.join(sentences)}"


def parts(title: str, gpu: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Of two steps on a card, part by part."""
    lines = _PARTS.format(title=title, card=find_gpu(gpu).full_name).splitlines()
    for part, since in sorted(old["parts"].items(), key=lambda item: -item[1]["slow"]):
        if since["slow"] < 0.01:
            continue
        seconds = [f"{one['parts'][part]['fast']:.2f} to {one['parts'][part]['slow']:.2f}" for one in (old, new)]
        works = [one["work"].get(part) for one in (old, new)]
        idle = ["" if work is None else f"{work['idle'] / 1e12:.1f}" for work in works]
        launches = ["" if work is None else f"{work['launches']:,}" for work in works]
        lines.append(f"| {' | '.join([named(part), *seconds, *idle, *launches])} |")
    return lines


def before_and_after(counts: dict[str, Any], steps: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [_COMPARED.format(commit=counts["commit"][:7]), *table(steps), "", summary(steps)]
    for model, gpu in (("qwen3-30b-a3b", "a6000"), ("mixtral-8x7b", "a6000"), ("mixtral-8x7b", "h100")):
        whats = list(COMPARED[model])
        times = [steps[model][what][gpu]["time"] for what in ("before", whats[BEST[model]])]
        lines += parts(f"{TITLES[model]}, {whats[BEST[model]]},", gpu, *times)
    return "\n".join(lines)


def cases(found: dict[str, dict[str, Duration]]) -> str:
    lines = []
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
                f"{size:,.1f} | {work.launches:,.0f} | {work.synchronizations:,.0f} |"
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
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    given = parser.parse_args()
    if given.before is not None:
        counts = counts_before(given.before.resolve())
    else:
        counts = json.loads(given.json.read_text(encoding="utf-8"))["before"]
    steps = compared(counts)
    found = {case: {gpu: duration_of(case, gpu) for gpu in CARDS} for case in CASES}
    given.page.write_text("\n".join([_HEAD, before_and_after(counts, steps), cases(found)]), encoding="utf-8")
    of_cases = {case: {gpu: time.to_json() for gpu, time in cards.items()} for case, cards in found.items()}
    report = {"schema": 1, "modelled": True, "commit": commit()}
    report |= {"versions": versions("torch", "transformers", "moetune"), "before": counts, "compared": steps}
    write_json({**report, "cases": of_cases}, given.json)


if __name__ == "__main__":
    main()
