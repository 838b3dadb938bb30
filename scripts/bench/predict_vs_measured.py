"""Peak memory, predicted beside measured: whole models on a GPU, or on a device that computes nothing (tests/nullcuda).

    python scripts/bench/predict_vs_measured.py --cap 44GiB --json predict_vs_measured.json
    python scripts/bench/predict_vs_measured.py --table docs/benchmarks/predict_vs_measured_cuda_*.json

Models with random weights take three steps in bfloat16, each case in a process of its own, with growing segments as in
`moetune train`. `--cap` stands for a smaller card: what CUDA takes outside the allocator is taken off it, the rest is
what the allocator may reserve. `allocated` and `reserved` are torch's peaks, `process` is what the driver says is in
use on the card at the end; the card must be free of other processes. They are predicted by a trace with the fullest
routing of the real steps. Whether a case fits is predicted with balanced routing, as before a run; one that was
predicted to fit and ran out of memory makes the exit code 1. A JSON file that is there keeps its other cases, and those
that it has from this commit are not run again. `--table` runs nothing: it writes the table of
docs/benchmarks/predict_vs_measured_cuda.md, a row for each file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# torch reads this when it is imported; `moetune` sets the same.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _common import LORA_16, ROOT, commit, rows_of, versions, write_json, write_table

from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.measurement.measure import catalog_name, measure
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.predict import predict
from moetune.run.resolve import resolve

sys.path.insert(0, str(ROOT))
from tests.nullcuda import device as nullcuda

GiB = 2**30
STEPS = 3
BYTES = ("allocated", "reserved", "process")
EXPERT_MEMORY = "256MiB"  # `auto` takes what is left of a card, and these cases run on cards of any size
Make = Callable[[], RunConfig]


def recipe(name: str, *settings: str) -> RunConfig:
    """A run file of `configs/` with random weights; `settings` as `--set` takes them."""
    fixed = ["model.weights=random", f"train.expert_memory={EXPERT_MEMORY}"]
    return load_run_config(ROOT / "configs" / f"{name}.yaml", [*fixed, *settings])


def catalog_run(model: str, adapt: dict[str, Any], /, **sections: dict[str, Any]) -> RunConfig:
    """One sequence of 2048 tokens at a time, two a step, 8-bit AdamW, on NF4; `sections` are merged into it."""
    train = {"micro_batch": 1, "accumulate": 2, "sequence_length": 2048, "checkpointing": "full"}
    run: dict[str, dict[str, Any]] = {
        "model": {"path": model, "weights": "random", "base": "nf4"},
        "adapt": adapt,
        "optimizer": {"name": "adamw8bit"},
        "train": train | {"expert_memory": EXPERT_MEMORY},
    }
    for name, section in sections.items():
        run[name] = run.get(name, {}) | section
    return RunConfig.model_validate(run)


def lora(model: str, /, **sections: dict[str, Any]) -> Make:
    """LoRA of rank 16 on attention and experts."""
    return partial(catalog_run, model, LORA_16, **sections)


def sets(name: str, *settings: str) -> Make:
    """A recipe; settings without a section are of `train`."""
    return partial(recipe, name, *(one if "." in one else f"train.{one}" for one in settings))


MXFP4 = {"base": "mxfp4"}
TOO_LARGE = "mixtral-8x7b-experts-of-16-layers"
PARTS: dict[str, dict[str, Make]] = {
    "mixtral": {name: sets(name) for name in ("mixtral-8x7b-lora", "mixtral-8x7b-experts", "mixtral-8x7b-router")},
    "mixtral-more": {
        "mixtral-8x7b-experts-lomo": sets("mixtral-8x7b-experts-lomo", "micro_batch=1"),
        "mixtral-8x7b-lora-1x2048": sets("mixtral-8x7b-lora", "micro_batch=1"),
        "mixtral-8x7b-lora-8x2048": sets("mixtral-8x7b-lora", "micro_batch=8"),
        "mixtral-8x7b-lora-4x2048-rows-kept": sets("mixtral-8x7b-lora", "micro_batch=4", "keep_rows=16"),
        "mixtral-8x7b-router-8x2048": sets("mixtral-8x7b-router", "micro_batch=8"),
        # Ten layers more than the recipe: this one must not fit a card of 44 GiB.
        TOO_LARGE: sets("mixtral-8x7b-experts", "adapt.router=0-15", "adapt.experts.layers=0-15"),
    },
    "mixtral-8x22b": {"mixtral-8x22b-lora-host": sets("mixtral-8x22b-lora-host")},
    "qwen3": {
        "qwen3-30b-a3b-lora": lora("qwen3-30b-a3b", train={"micro_batch": 2}),
        "qwen3-30b-a3b-lora-8x2048-rows-kept": lora("qwen3-30b-a3b", train={"micro_batch": 8, "keep_rows": 48}),
    },
    "others": {
        "olmoe-1b-7b-experts": partial(
            catalog_run, "olmoe-1b-7b", {"router": "0-7", "experts": {"layers": "0-7", "ids": "0-31"}}
        ),
        "gpt-oss-20b-lora": lora("gpt-oss-20b"),
        "gpt-oss-20b-lora-eager": lora(
            "gpt-oss-20b", model={"attention": "eager"}, data={"train": "unread", "packing": False}
        ),
        "gpt-oss-20b-lora-1x32768": lora("gpt-oss-20b", model=MXFP4, train={"sequence_length": 32768}),
        "deepseek-v2-lite-lora": lora("deepseek-v2-lite", train={"sequence_length": 4096}),
        "qwen1.5-moe-a2.7b-lora": lora("qwen1.5-moe-a2.7b"),
        "granite-3.1-3b-a800m-experts-unchecked": partial(
            catalog_run,
            "granite-3.1-3b-a800m",
            {"router": "all", "experts": {"layers": "all", "ids": "0-7"}},
            train={"checkpointing": "none"},
        ),
        "llama-3-8b-full-lomo": partial(
            catalog_run, "llama-3-8b", {"also": ["*"]}, optimizer={"name": "lomo"}, train={"accumulate": 1}
        ),
        "llama-3-8b-lora-1x8192": partial(
            catalog_run,
            "llama-3-8b",
            {"lora": {**LORA_16["lora"], "targets": ["attention"]}},
            train={"sequence_length": 8192},
        ),
    },
    "near-the-line": {
        # Said to fit 44 GiB with room, barely; and the longest sequence that is predicted to fit 44.4 GiB.
        "mixtral-8x7b-router-24x2048": sets("mixtral-8x7b-router", "micro_batch=24", "accumulate=1"),
        "gpt-oss-20b-lora-1x127488": lora(
            "gpt-oss-20b", model=MXFP4, train={"sequence_length": 127488, "accumulate": 1}
        ),
    },
    "newer": {
        **{
            f"{model}-lora": sets(f"{model}-lora")
            for model in ("gemma-4-26b-a4b", "glm-4.7-flash", "nemotron-3-nano-30b-a3b", "qwen3.5-35b-a3b")
        },
        **{
            f"{model}-lora": lora(model)
            for model in ("ernie-4.5-21b-a3b", "lfm2-8b-a1b", "kimi-linear-48b-a3b", "qwen3-next-80b-a3b")
        },
    },
    "large": {
        "minimax-m2.5-router": partial(catalog_run, "minimax-m2.5", {"router": "all"}),
        "deepseek-v3.2-router-host": partial(
            catalog_run, "deepseek-v3.2", {"router": "all"}, model={"experts_on": "host"}, train={"accumulate": 1}
        ),
    },
}
"""The cases in parts that each take less than nine minutes of a GPU."""
CASES: dict[str, Make] = {name: make for part in PARTS.values() for name, make in part.items()}


def run_on_cuda(name: str, cap: int | None) -> dict[str, Any]:
    """One case in this process: predicted as before a run, measured, and predicted with what its experts received."""
    config, device, steps = CASES[name](), torch.device("cuda", 0), STEPS
    if nullcuda.is_present():  # no time is taken there, and micro-steps after the second take the same memory
        train = {"accumulate": min(2, config.train.accumulate)}
        steps, config = 2, config.model_copy(update={"train": config.train.model_copy(update=train)})
    row = {"case": name, **claim(device, cap)}
    row["predicted_before"] = before = predicted(config, BALANCED)
    row["fits"] = before["with_loading"] <= row["usable"]
    try:
        with answering():
            measured = measure(resolve(config, "cuda"), device, steps=steps)
    except torch.OutOfMemoryError as error:
        frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        row["out_of_memory"] = {"loading": "build" in frames, "message": str(error)}
        return row | {"predicted": before, "measured": None}
    # on the null device all experts received as many: nothing else is known than before
    known = before if nullcuda.is_present() else predicted(config, measured.routing)
    return row | {
        "predicted": known,
        "measured": {kind: getattr(measured, f"peak_{kind}") for kind in BYTES},
        # the most tokens that an expert received in one micro-batch, as a multiple of the mean
        "fullest_expert": max((max(rows) * len(rows) / sum(rows) for rows in measured.counts), default=None),
        "tokens_per_second": round(measured.tokens_per_second, 1),
    }


def answering() -> AbstractContextManager[None]:
    """What the null device cannot answer, answered there."""
    return nullcuda.answering() if nullcuda.is_present() else nullcontext()


def claim(device: torch.device, cap: int | None) -> dict[str, Any]:
    """Keeps this process to `cap` bytes of the card, CUDA's own included; says what the card is and what was in use."""
    torch.cuda.init()
    torch.ones(1, device=device)  # the context comes with the first allocation
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    usable = min(cap or total, total)
    torch.cuda.set_per_process_memory_fraction((usable - outside) / total, device)
    properties = torch.cuda.get_device_properties(device)
    card = {"name": properties.name, "memory": total, "capability": [properties.major, properties.minor]}
    return {"device": card | {"cuda": torch.version.cuda}, "outside_before": outside, "usable": usable}


def predicted(config: RunConfig, routing: AssumedRouting) -> dict[str, int]:
    """Bytes on this card; `with_loading` is the most that the process takes, loading included, and from `low` to `high`
    the range of it."""
    report = predict(resolve(config, "cuda"), gpu=catalog_name(torch.device("cuda", 0)), routing=routing)
    peaks = {kind: getattr(report.fullest, f"peak_{kind}") for kind in BYTES}
    return peaks | {"with_loading": report.peak_process, "low": report.span.low, "high": report.span.high}


def in_own_process(name: str, cap: int | None) -> dict[str, Any]:
    """`run_on_cuda` in a new process: a peak of its own, and an error of its own, which becomes `failed`."""
    command = [sys.executable, __file__, "--case", name] + ([] if cap is None else ["--cap", f"{cap}B"])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"case": name, "failed": f"exit code {done.returncode}"}
    return json.loads(lines[-1])


def verdict(row: dict[str, Any]) -> str:
    """Whether the prediction of fitting came true."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    if row["measured"] is not None:
        return "fits and ran" if row["fits"] else "ran, predicted not to fit"
    said = "FALSE FITS: predicted to fit" if row["fits"] else "does not fit"
    return f"{said}, out of memory" + (" while loading" if row["out_of_memory"]["loading"] else "")


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a case makes the exit code 1: it broke, or it was said to fit and did not."""
    return "failed" in row or (row["fits"] and row["measured"] is None)


# --- The report -----------------------------------------------------------------------------------------------


def off(predicted: int | None, measured: int | None) -> str:
    return "–" if predicted is None or measured is None else f"{100 * (predicted / measured - 1):+.2f} %"


def size(count: int | None) -> str:
    return "–" if count is None else f"{count / GiB:,.2f} GiB"


def lines_of(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Markdown, a line at a time, each as soon as its case is done: each kind of bytes as predicted, measured and off
    by, then the verdict."""
    yield "| case |" + "".join(f" {kind}: predicted | measured | off by |" for kind in BYTES) + " verdict |"
    yield "|---|" + "---:|" * 9 + "---|"
    for row in rows:
        cells = [row["case"]]
        for kind in BYTES:
            predicted, measured = ((row.get(side) or {}).get(kind) for side in ("predicted", "measured"))
            cells += [size(predicted), size(measured), off(predicted, measured)]
        yield f"| {' | '.join([*cells, verdict(row)])} |"


def table(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page's table: of each device, between which errors the predictions lie."""
    ran = [row for report in reports for row in report["cases"] if row.get("measured")]
    inside, width = coverage(ran)
    yield f"**In their range: {inside} of {len(ran)} runs**; its median width: {width}.\n"
    heads = ("cases", "allocated: measured", "off by", "reserved: off by", "in the range", "its width")
    yield f"| device | {' | '.join(heads)} | wrong verdicts | commits |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    for report in reports:
        card, rows = report["device"], report["cases"]
        ran = [row for row in rows if row.get("measured")]
        sizes = sorted(row["measured"]["allocated"] for row in ran)
        inside, width = coverage(ran)
        cells = (
            f"Capability {'.'.join(map(str, card['capability']))}, as {card['name']}", len(rows),
            f"{size(sizes[0])} to {size(sizes[-1])}", farthest("allocated", ran), farthest("reserved", ran),
            f"{inside} of {len(ran)}", width, sum(map(is_wrong, rows)),
            ", ".join(sorted({str(row["commit"])[:12] for row in rows})),
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    used = reports[0]["versions"].items()
    yield f"\n{', '.join(f'{name} {version}' for name, version in used if name != 'moetune')}."


def farthest(kind: str, rows: list[dict[str, Any]]) -> str:
    """Between which errors the predictions of a kind of bytes lie."""
    pairs = [(row["predicted"][kind], row["measured"][kind]) for row in rows]
    low, high = (end(pairs, key=lambda pair: pair[0] / pair[1]) for end in (min, max))
    return f"{off(*low)} to {off(*high)}"


def coverage(rows: list[dict[str, Any]]) -> tuple[int, str]:
    """How many runs needed between the low and the high end of what was predicted; its median width. Where loading
    takes more than a step, what is predicted of it counts: it was not measured."""
    inside, widths = 0, []
    for said, allocated in ((row["predicted"], row["measured"]["allocated"]) for row in rows):
        loading = said["with_loading"] if said["with_loading"] > said["process"] else 0
        inside += said["low"] <= max(allocated + said["process"] - said["reserved"], loading) <= said["high"]
        widths.append(100 * (said["high"] - said["low"]) / said["process"])
    return inside, f"{median(widths):.1f} %"


def run(names: list[str], cap: int | None, file: Path | None = None) -> dict[str, Any]:
    """Runs the cases, prints the table, and returns everything that the JSON holds, which is written after each."""
    rows, now = rows_of(file, "case"), commit()

    def report() -> dict[str, Any]:
        cards = [row["device"] for row in rows.values() if "device" in row]
        assert all(card["name"] == cards[0]["name"] for card in cards), f"{file}: cases of another card"
        return {
            "schema": 1,
            "benchmark": "predict_vs_measured",
            "versions": versions("moetune", "torch", "transformers", "peft", "bitsandbytes"),
            "device": (cards or [None])[0],
            "commit": now,
            "steps": STEPS,
            "cap": cap,
            "null_device": nullcuda.is_present(),
            "cases": [*rows.values()],
        }

    def results() -> Iterator[dict[str, Any]]:
        for name in names:
            if (name,) not in rows or rows[name,]["commit"] != now:
                rows[name,] = in_own_process(name, cap) | {"commit": now}
                if file is not None:
                    write_json(report(), file)
            yield rows[name,]

    for line in lines_of(results()):
        print(line, flush=True)
    return report()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", help=f"comma-separated names, or parts: {', '.join(PARTS)}; default all")
    parser.add_argument("--cap", metavar="SIZE", help="as if the card had this much, such as 44GiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="write the page's table from these")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table is not None:
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in options.table]
        write_table(table(reports), ROOT / "docs/benchmarks/predict_vs_measured_cuda.md")
        return
    names = [case for name in (options.cases or ",".join(PARTS)).split(",") for case in PARTS.get(name, (name,))]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, nor a null one")
    cap = None if options.cap is None else find_gpu(options.cap).memory.value
    torch.set_num_threads(1)
    if options.case is not None:
        print(json.dumps(run_on_cuda(options.case, cap)))
        return
    if any(map(is_wrong, run(names, cap, options.json)["cases"])):
        sys.exit(1)


if __name__ == "__main__":
    main()
