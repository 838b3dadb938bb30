"""Runs that just fit a card, or just do not: what `predict` says of each, beside whether it ran.

    python scripts/bench/near_the_line.py --recipes --drawn 40 --json docs/benchmarks/near_the_line.json
    python scripts/bench/near_the_line.py --drawn 60 --models mixtral-8x7b --routing scripts/bench/expert_load.json \\
        --json docs/benchmarks/near_the_line.json

For a run file and a card the largest micro-batches are found for which the prediction says `yes`, and at least
`tight`; they are traced and run, and so is the next one. `--recipes` takes Mixtral-8x7B as in `configs/`: routers,
experts, LoRA. `--drawn N` takes N run files of several models, drawn with a fixed seed, each at the largest that is let
through, or one row above.

Each case has a process of its own, which may have so much of the card as `--cards` say: 24 and 44 GiB, all of a process
included. Where there is no card (tests/nullcuda) the predicted context is taken off. `--routing FILE` predicts with
recorded loads of experts and, where there is no card, replays them, layer by layer. A `false yes` was predicted to fit
with room, and ran out of memory; a `false no` ran; `below low` needed less than the low end of its range. The exit code
is 1 if there is any of them but a false no. A JSON file that is there keeps its other cases, and those that it has from
this commit are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _common import commit, rows_of, spread, versions, write_json, write_table
from predict_vs_measured import GiB, answering, catalog_run, claim, nullcuda, recipe
from pydantic import ValidationError

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.experts import context
from moetune.memory.assumed_routing import AssumedRouting, parse_routing
from moetune.memory.measurement.measure import measure
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.planning.fit import headroom, last_that_fits, surely_left
from moetune.planning.predict import predict
from moetune.planning.settle import settled
from moetune.run.resolve import resolve

RECIPES = ("mixtral-8x7b-router", "mixtral-8x7b-experts", "mixtral-8x7b-lora")
CARDS = ("24GiB", "44GiB")
MODELS = ("mixtral-8x7b", "olmoe-1b-7b", "granite-3.1-3b-a800m", "deepseek-v2-lite", "qwen1.5-moe-a2.7b", "llama-3-8b")
KEY = ("case", "card", "rows", "routing")
"""What tells cases apart in a JSON file."""
MOST = 256
"""Rows of a micro-batch, at most."""


def with_rows(config: RunConfig, rows: int) -> RunConfig:
    """The run with micro-batches of so many rows, two a step at most: a third would take the same."""
    train = {"micro_batch": rows, "accumulate": min(2, config.train.accumulate)}
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def card_here(size: str) -> Gpu:
    """A card of this size, whose cuBLAS is that of the device at hand: its workspaces differ between capabilities."""
    card, here = find_gpu(size), find_gpu(torch.cuda.get_device_name())
    return replace(card, capability=here.capability, cublas_workspace=here.cublas_workspace)


def largest(config: RunConfig, card: str, *, with_room: bool = False, routing: str | None = None) -> int:
    """The most rows of a micro-batch that the prediction lets through: 0 if not even one, `MOST` if so many.

    Args:
        with_room: whether its verdict is to be `yes`, not `tight`.
    """

    def predicted(number: int) -> MemoryReport:
        run = resolve(with_rows(config, number + 1), "cuda")
        return predict(run, gpu=card_here(card), routing=parse_routing(routing))

    return 1 + last_that_fits(MOST, predicted, surely_left if with_room else headroom)[0]


def drawn(draw: random.Random, models: Sequence[str]) -> RunConfig:
    """A run file; settings that do not go together are drawn again."""
    while True:
        model = draw.choice(models)
        name = draw.choice(("adamw", "adamw8bit", "lion8bit", "adafactor", "lomo"))
        experts = {"experts": {"layers": "0-3", "ids": [0, 1]}, "router": "0-3"}
        linears = {"lora": {"rank": draw.choice((8, 16)), "alpha": 16, "targets": ["attention"]}}
        every = {"lora": {**linears["lora"], "targets": ["attention", "experts"]}}
        adapt = linears if model == "llama-3-8b" else draw.choice(({"router": "all"}, experts, linears, every))
        is_fused = name == "lomo" or draw.random() < 0.3
        sections: dict[str, dict[str, Any]] = {
            "optimizer": {"name": name, "fused_backward": is_fused},
            "train": {
                "sequence_length": draw.choice((1024, 2048, 4096)),
                "accumulate": 1 if is_fused else 2,
                "checkpointing": draw.choice(("none", "experts_only", "full", "offload")),
                "max_grad_norm": draw.choice((0.0, 1.0)),
            },
            "data": {"train": "unread", "packing": draw.random() < 0.7},
        }
        try:
            config = catalog_run(model, adapt, **sections)
            resolve(config, "cuda")
        except (ValidationError, UserError):
            continue
        return config


def cases(
    recipes: bool, count: int, cards: Sequence[str], models: Sequence[str], seed: int, routing: str | None = None
) -> Iterator[tuple[str, RunConfig, str, int]]:
    """(name, run file, card, rows of a micro-batch)."""
    if recipes:
        for name in RECIPES:
            for card in cards:
                config = recipe(name, "train.micro_batch=1", "train.accumulate=1")
                rows = largest(config, card)
                sizes = {largest(config, card, with_room=True), rows, rows + 1} - {0}
                yield from ((name, config, card, number) for number in sorted(sizes))
    draw = random.Random(seed)
    made = 0
    while made < count:
        config, card, more = drawn(draw, models), draw.choice(cards), draw.choice((0, 1))
        rows = largest(config, card, with_room=routing is not None, routing=routing)
        if 0 < rows < MOST:
            made += 1
            yield f"drawn {made}: {config.model.path}", config, card, rows + more


def recorded(file: Path) -> Iterator[tuple[str, RunConfig, str, int, str | None]]:
    """What `cases` gave when the file was written, and the recorded loads."""
    for row in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        yield row["case"], RunConfig.model_validate(row["run"]), row["card"], row["rows"], row["routing"]


def judge(name: str, config: RunConfig, card: str, rows: int, routing: str | None = None) -> dict[str, Any]:
    """Predicts a case, runs it in a process of its own, and compares."""
    config = with_rows(config, rows)
    run = settled(resolve(config, "cuda"), card_here(card), parse_routing(routing))  # as the trainer does
    report = predict(run, gpu=card_here(card), routing=parse_routing(routing))
    command = [sys.executable, __file__, "--cards", card, "--run", run.config.model_dump_json()]
    command += [] if routing is None else ["--routing", routing]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} with {rows} rows failed: exit code {done.returncode}")
    ran = json.loads(done.stdout.splitlines()[-1])
    assert report.gpu is not None
    return {
        "case": name,
        "card": card,
        "run": config.model_dump(mode="json", exclude_unset=True),
        "rows": rows,
        "routing": routing,
        "required": report.required,
        "range": report.span.to_json(),
        "outside": report.fullest.outside_allocator,
        "usable": report.gpu.usable_bytes,
        "verdict": report.verdict,
        "peak_reserved": report.fullest.peak_reserved,
        "commit": commit(),
        **ran,
    }


def replay(routing: str) -> None:
    """Make the null device say that experts receive recorded shares of the rows; layers follow one another."""
    load = dict(parse_routing(routing).load)
    layers = cycle(sorted(load))

    def listed(counts: torch.Tensor, rows: int) -> list[int]:
        layer = next(layers)
        return AssumedRouting("", None, ((layer, load[layer]),)).rows(layer, rows, 1, len(load[layer]))

    context.listed = listed


def run_here(config: RunConfig, card: str, routing: str | None = None) -> dict[str, Any]:
    """Two steps on the device of this process, of which it may have as much as the card has."""
    device, gpu = torch.device("cuda", 0), find_gpu(card)
    claim(device, gpu.memory.value - (gpu.context.value if nullcuda.is_present() else 0))
    try:
        with answering():
            if routing is not None:
                replay(routing)
            measured = measure(resolve(config, "cuda"), device, steps=2)
    except torch.OutOfMemoryError:
        return {"ran": False, "measured": None}
    return {"ran": True, "measured": {"allocated": measured.peak_allocated, "reserved": measured.peak_reserved}}


def took(row: dict[str, Any]) -> int:
    """Bytes that a run needed which ran: allocated, and outside the allocator."""
    return row["measured"]["allocated"] + row["outside"]


def said(row: dict[str, Any]) -> str:
    """Whether the verdict came true."""
    if row["ran"] and took(row) < row["range"]["low"]:
        return "BELOW LOW"
    if row["ran"]:
        return "false no" if row["verdict"] == "no" else "ran"
    return {"yes": "FALSE YES", "tight": "out of memory, said tight"}.get(row["verdict"], "out of memory")


def line(row: dict[str, Any]) -> str:
    """What is printed of a case."""
    share = f"{row['required'] / GiB:.2f} GiB, {100 * row['required'] / row['usable']:.1f} % of the card"
    length = row["run"]["train"]["sequence_length"]
    return f"{row['case']}, {row['card']}, {row['rows']} × {length}: {share}, {row['verdict']}: {said(row)}"


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table: how many runs lie in their range, and by verdict, what happened."""
    if ranges := [row for row in report["cases"] if "range" in row]:
        yield f"{coverage(ranges)}\n"
    yield "| experts' loads | verdict | runs | ran | out of memory | required, of the card: least, median, most |"
    yield "|---|---|---:|---:|---:|---:|"
    for loads, verdict in product(("balanced", "recorded"), ("yes", "tight", "no")):
        is_recorded = loads == "recorded"
        cases = [row for row in report["cases"] if row["verdict"] == verdict and bool(row["routing"]) == is_recorded]
        if cases:
            ran = sum(row["ran"] for row in cases)
            shares = spread((100 * row["required"] / row["usable"] for row in cases), "{:.1f} %")
            yield f"| {loads} | {verdict} | {len(cases)} | {ran} | {len(cases) - ran} | {shares} |"
    made = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield f"\nCommits {', '.join(sorted({str(row['commit'])[:12] for row in report['cases']}))}; {made}."


def coverage(rows: Sequence[dict[str, Any]]) -> str:
    """How many runs lie in their range, and how wide it is. One that ran out of memory needs more than the card has:
    that lies in its range if the high end does not fit."""
    ran = [row for row in rows if row["ran"]]
    inside = sum(row["range"]["low"] <= took(row) <= row["range"]["high"] for row in ran)
    beyond = sum(row["range"]["high"] > row["usable"] for row in rows if not row["ran"])
    widths = [100 * (row["range"]["high"] - row["range"]["low"]) / row["required"] for row in rows]
    return (
        f"**In their range: {inside} of {len(ran)} that ran, {beyond} of {len(rows) - len(ran)} that did not; "
        f"its width, of what is required: {spread(widths, '{:.1f} %')}** (least, median, most)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", action="store_true", help="Mixtral-8x7B: routers, experts, LoRA")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="run files drawn with a fixed seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS), help="what is drawn from, comma-separated")
    parser.add_argument("--cards", default=",".join(CARDS), help="sizes, comma-separated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here, and its page beside it")
    parser.add_argument("--again", type=Path, metavar="FILE", help="the cases of this JSON, with as many rows as there")
    parser.add_argument("--routing", metavar="FILE", help="recorded loads of experts, as from moetune score")
    parser.add_argument("--run", help="run this one in this process: a run file as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cards = options.cards.split(",")
    if options.run:
        print(json.dumps(run_here(RunConfig.model_validate_json(options.run), cards[0], options.routing)))
        return
    report: dict[str, Any] = {
        "schema": 1,
        "benchmark": "near_the_line",
        "versions": versions("torch", "transformers", "peft", "bitsandbytes"),
        "device": torch.cuda.get_device_name(),
        "null_device": nullcuda.is_present(),
        "commit": commit(),
        "models": options.models,
        "cases": [],
    }
    written = rows_of(options.json, *KEY)

    def results() -> Iterator[dict[str, Any]]:
        models = options.models.split(",")
        some = cases(options.recipes, options.drawn, cards, models, options.seed, options.routing)
        given = ((*case, options.routing) for case in some) if options.again is None else recorded(options.again)
        for case in given:
            name, _, card, rows, routing = case
            key = name, card, rows, routing
            if key not in written or written[key]["commit"] != report["commit"]:
                written[key] = judge(*case)
            report["cases"] = [*written.values()]
            if options.json is not None:
                write_json(report, options.json)
                write_table(table(report), options.json.with_suffix(".md"))
            yield written[key]

    for row in results():
        print(line(row), flush=True)
    if any(said(row) in ("FALSE YES", "BELOW LOW") for row in report["cases"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
