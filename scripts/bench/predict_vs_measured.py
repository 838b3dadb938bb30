"""Peak memory, predicted beside measured: by trace, and on CUDA what the allocator makes of it.

    python scripts/bench/predict_vs_measured.py --json docs/benchmarks/predict_vs_measured.json
    python scripts/bench/predict_vs_measured.py --device cuda --cap 44GiB --json predict_vs_measured_cuda.json
    python scripts/bench/predict_vs_measured.py --commands --json docs/benchmarks/predict_vs_measured_commands.json

All weights and tokens are random. Both sides count the same: real steps, and steps on fake tensors.

**On a CPU** catalog models, shrunk, take two float32 steps; the tracker of the trace counts the storages of real
tensors. Beside that stand traces that differ in what they know of tokens per expert: `as routed`,
every answer of the real steps; `fullest`, each layer's fullest micro-step; `balanced`, nothing, as
`moetune predict` before a run; `worst`, that all tokens choose the same experts. `fullest expert` is the most tokens
that one received in a micro-batch, as a multiple of the mean.

**On CUDA** whole models take three steps in bfloat16, each case in a process of its own, with growing segments as in
`moetune train`. `--cap` stands for a smaller card: what CUDA takes outside the allocator is taken off it, the rest is
what the allocator may reserve. `allocated` and `reserved` are torch's peaks, `process` is what the driver says is in
use on the card at the end; the card must be free of other processes. They are predicted by a trace with the fullest
routing of the real steps. Whether a case fits is predicted with balanced routing, as before a run; one that was
predicted to fit and ran out of memory makes the exit code 1. A JSON file that is there keeps its other cases, and those
that it has from this commit are not run again.

**Commands** and TRL's trainers run on the null device alone (command_peaks.py), each in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# torch reads this when it is imported; `moetune` sets the same.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _common import LORA_16, ROOT, MiB, commit, cpu_name, rows_of, versions, write_json, write_table

from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.experts.context import CountRows
from moetune.memory.assumed_routing import BALANCED, AssumedRouting, parse_routing
from moetune.memory.measurement.measure import Measured, measure
from moetune.memory.trace import NotTraceable, trace
from moetune.models.catalog import find_model
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.predict import predict
from moetune.run.resolve import ResolvedRun, resolve

sys.path.insert(0, str(ROOT))
from tests.nullcuda import device as nullcuda

GiB = 2**30
CPU_STEPS, CUDA_STEPS = 2, 3
BYTES = ("allocated", "reserved", "process")

# --- Cases on a CPU -------------------------------------------------------------------------------------------

HIDDEN, HEADS, HEAD_DIM, LAYERS, VOCABULARY, EXPERTS, TOP_K, LATENT = 256, 8, 32, 4, 2048, 16, 4, 64
LORA = {"lora": {"rank": 8, "alpha": 16, "targets": ["attention", "experts"]}}
ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"router": "0-2", "experts": {"layers": "0-2", "ids": [0, 1]}},
    "lora": LORA,
    "attention": {"lora": {**LORA["lora"], "targets": ["attention"]}},
}


@dataclass(frozen=True)
class CpuCase:
    """A catalog model, shrunk, with a way to train it; the key of `ADAPT` and the names of the run file."""

    model: str
    adapt: str
    optimizer: str
    checkpointing: str = "full"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.adapt}" + ("" if self.checkpointing == "full" else "-unchecked")


CPU_CASES = {
    case.name: case
    for case in (
        CpuCase("mixtral-8x7b", "router", "adamw"),
        CpuCase("mixtral-8x7b", "experts", "adamw8bit"),
        CpuCase("mixtral-8x7b", "lora", "adamw8bit"),
        CpuCase("mixtral-8x7b", "lora", "adamw8bit", checkpointing="none"),
        CpuCase("qwen3-30b-a3b", "lora", "adamw"),
        CpuCase("qwen1.5-moe-a2.7b", "experts", "adamw"),
        CpuCase("olmoe-1b-7b", "experts", "adamw8bit"),
        CpuCase("granite-3.1-3b-a800m", "lora", "sgd"),
        CpuCase("phi-3.5-moe", "experts", "adamw"),
        CpuCase("deepseek-v2-lite", "lora", "adamw8bit"),
        CpuCase("deepseek-v3", "router", "sgd"),
        CpuCase("glm-4.5-air", "router", "adamw", checkpointing="none"),
        CpuCase("gpt-oss-20b", "lora", "adamw"),
        CpuCase("llama-7b", "attention", "adamw"),
    )
}


def shrunk(model: str) -> dict[str, Any]:
    """A catalog model's configuration at toy size: its proportions and its switches, 256 wide, 4 layers."""
    entry = find_model(model)
    assert entry is not None
    config = copy.deepcopy(entry.config)
    scale = HIDDEN / config["hidden_size"]
    kv_heads = HEADS * config.get("num_key_value_heads", config["num_attention_heads"]) // config["num_attention_heads"]
    latent = "kv_lora_rank" in config
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS,
        "num_key_value_heads": max(1, kv_heads),
        **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD_DIM),
        "qk_rope_head_dim": HEAD_DIM // 2,
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), LATENT),
        "first_k_dense_replace": 1,
        "sliding_window": 64,
    }
    sizes |= {
        name: -(-round(config[name] * scale) // 32) * 32
        for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        if name in config
    }
    sizes |= {
        name: min(config[name], EXPERTS)
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
        if name in config
    }
    for name, size in sizes.items():
        if config.get(name) is not None:
            config[name] = size
    for name in ("num_experts_per_tok", "experts_per_token"):
        if name in config:
            config[name] = min(config[name], TOP_K)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    scaling = config.get("rope_scaling") or {}
    for name in ("long_factor", "short_factor"):  # one factor for each pair of rotated numbers
        if name in scaling:
            scaling[name] = scaling[name][: HEAD_DIM // 2]
    if not latent and config["model_type"] != "llama":
        config["head_dim"] = HEAD_DIM
    config.pop("quantization_config", None)
    for name in [name for name in config if name.endswith("_token_id")]:
        config[name] = 0
    return config


def cpu_config(case: CpuCase, folder: Path) -> RunConfig:
    """Writes the shrunk model into `folder` and gives its run file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shrunk(case.model)), encoding="utf-8")
    return RunConfig.model_validate(
        {
            "model": {
                "path": str(folder),
                "weights": "random",
                "base": "nf4",
                "dtype": "fp32",
            },
            "adapt": ADAPT[case.adapt],
            "optimizer": {"name": case.optimizer},
            "train": {
                "micro_batch": 2,
                "accumulate": 2,
                "sequence_length": 256,
                "checkpointing": case.checkpointing,
            },
            "data": {"train": "unread", "packing": True},
        }
    )


def run_on_cpu(case: CpuCase) -> dict[str, Any]:
    """Bytes of one case: measured, and predicted in every way; None where a way does not know the model."""
    with tempfile.TemporaryDirectory() as folder:
        run = resolve(cpu_config(case, Path(folder)), "cpu")
        measured = measure(run, "cpu", steps=CPU_STEPS)
        answers = iter(measured.counts)
        return {
            "case": case.name,
            **asdict(case),
            "fullest_expert": fullest_expert(measured),
            "measured": measured.peak_allocated,
            "trace": {
                "as_routed": traced_peak(run, lambda *_: next(answers)),
                "fullest": traced_peak(run, measured.routing),
                "balanced": traced_peak(run, BALANCED),
                "worst": traced_peak(run, parse_routing("worst")),
            },
        }


def fullest_expert(measured: Measured) -> float | None:
    """The most tokens that an expert received in one micro-batch, as a multiple of the mean; None without experts."""
    return max((max(rows) * len(rows) / sum(rows) for rows in measured.counts), default=None)


def traced_peak(run: ResolvedRun, routing: AssumedRouting | CountRows) -> int | None:
    """The trace's peak; None for a model whose code looks at values. Answers given one by one need every micro-step."""
    every: dict[str, Any] = {} if isinstance(routing, AssumedRouting) else {"micro_steps": run.config.train.accumulate}
    try:
        traced = trace(run, routing, **every)
    except NotTraceable:
        return None
    return traced.parts().total


# --- Cases on CUDA --------------------------------------------------------------------------------------------


EXPERT_MEMORY = "256MiB"  # `auto` takes what is left of a card, and these cases run on cards of any size


def recipe(name: str, *settings: str) -> RunConfig:
    """A run file of `configs/` with random weights; `settings` as `--set` takes them."""
    fixed = ["model.weights=random", f"train.expert_memory={EXPERT_MEMORY}"]
    return load_run_config(ROOT / "configs" / f"{name}.yaml", [*fixed, *settings])


def catalog_run(model: str, adapt: dict[str, Any], /, **sections: dict[str, Any]) -> RunConfig:
    """One sequence of 2048 tokens at a time, two a step, 8-bit AdamW, on NF4; `sections` are merged into it."""
    run: dict[str, dict[str, Any]] = {
        "model": {"path": model, "weights": "random", "base": "nf4"},
        "adapt": adapt,
        "optimizer": {"name": "adamw8bit"},
        "train": {
            "micro_batch": 1,
            "accumulate": 2,
            "sequence_length": 2048,
            "checkpointing": "full",
            "expert_memory": EXPERT_MEMORY,
        },
    }
    for name, section in sections.items():
        run[name] = run.get(name, {}) | section
    return RunConfig.model_validate(run)


TOO_LARGE = "mixtral-8x7b-experts-of-16-layers"
CUDA_CASES: dict[str, Callable[[], RunConfig]] = {
    "mixtral-8x7b-lora": partial(recipe, "mixtral-8x7b-lora"),
    "mixtral-8x7b-experts": partial(recipe, "mixtral-8x7b-experts"),
    "mixtral-8x7b-router": partial(recipe, "mixtral-8x7b-router"),
    "mixtral-8x7b-experts-lomo": partial(recipe, "mixtral-8x7b-experts-lomo", "train.micro_batch=1"),
    "mixtral-8x7b-lora-1x2048": partial(recipe, "mixtral-8x7b-lora", "train.micro_batch=1"),
    "mixtral-8x7b-lora-8x2048": partial(recipe, "mixtral-8x7b-lora", "train.micro_batch=8"),
    "mixtral-8x7b-lora-4x2048-rows-kept": partial(
        recipe, "mixtral-8x7b-lora", "train.micro_batch=4", "train.keep_rows=16"
    ),
    "mixtral-8x7b-router-8x2048": partial(recipe, "mixtral-8x7b-router", "train.micro_batch=8"),
    # Said to fit 44 GiB with room, barely.
    "mixtral-8x7b-router-24x2048": partial(recipe, "mixtral-8x7b-router", "train.micro_batch=24", "train.accumulate=1"),
    "mixtral-8x22b-lora-host": partial(recipe, "mixtral-8x22b-lora-host"),
    "qwen3-30b-a3b-lora": partial(catalog_run, "qwen3-30b-a3b", LORA_16, train={"micro_batch": 2}),
    "qwen3-30b-a3b-lora-8x2048-rows-kept": partial(
        catalog_run, "qwen3-30b-a3b", LORA_16, train={"micro_batch": 8, "keep_rows": 48}
    ),
    "olmoe-1b-7b-experts": partial(
        catalog_run, "olmoe-1b-7b", {"router": "0-7", "experts": {"layers": "0-7", "ids": "0-31"}}
    ),
    "gpt-oss-20b-lora": partial(catalog_run, "gpt-oss-20b", LORA_16),
    "gpt-oss-20b-lora-eager": partial(
        catalog_run,
        "gpt-oss-20b",
        LORA_16,
        model={"attention": "eager"},
        data={"train": "unread", "packing": False},
    ),
    "gpt-oss-20b-lora-1x32768": partial(
        catalog_run, "gpt-oss-20b", LORA_16, model={"base": "mxfp4"}, train={"sequence_length": 32768}
    ),
    # The longest sequence that is predicted to fit 44.4 GiB.
    "gpt-oss-20b-lora-1x127488": partial(
        catalog_run,
        "gpt-oss-20b",
        LORA_16,
        model={"base": "mxfp4"},
        train={"sequence_length": 127488, "accumulate": 1},
    ),
    "deepseek-v2-lite-lora": partial(catalog_run, "deepseek-v2-lite", LORA_16, train={"sequence_length": 4096}),
    "qwen1.5-moe-a2.7b-lora": partial(catalog_run, "qwen1.5-moe-a2.7b", LORA_16),
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
    **{
        name: partial(recipe, name)
        for name in (
            "gemma-4-26b-a4b-lora",
            "glm-4.7-flash-lora",
            "nemotron-3-nano-30b-a3b-lora",
            "qwen3.5-35b-a3b-lora",
        )
    },
    **{
        f"{model}-lora": partial(catalog_run, model, LORA_16)
        for model in ("ernie-4.5-21b-a3b", "lfm2-8b-a1b", "kimi-linear-48b-a3b", "qwen3-next-80b-a3b")
    },
    "minimax-m2.5-router": partial(catalog_run, "minimax-m2.5", {"router": "all"}),
    "deepseek-v3.2-router-host": partial(
        catalog_run, "deepseek-v3.2", {"router": "all"}, model={"experts_on": "host"}, train={"accumulate": 1}
    ),
    # Ten layers more than the recipe: this one must not fit a card of 44 GiB.
    TOO_LARGE: partial(recipe, "mixtral-8x7b-experts", "adapt.router=0-15", "adapt.experts.layers=0-15"),
}
PARTS = {
    "mixtral": ("mixtral-8x7b-lora", "mixtral-8x7b-experts", "mixtral-8x7b-router"),
    "mixtral-more": (
        "mixtral-8x7b-experts-lomo",
        "mixtral-8x7b-lora-1x2048",
        "mixtral-8x7b-lora-8x2048",
        "mixtral-8x7b-lora-4x2048-rows-kept",
        "mixtral-8x7b-router-8x2048",
        TOO_LARGE,
    ),
    "mixtral-8x22b": ("mixtral-8x22b-lora-host",),
    "qwen3": ("qwen3-30b-a3b-lora", "qwen3-30b-a3b-lora-8x2048-rows-kept"),
    "others": (
        "olmoe-1b-7b-experts",
        "gpt-oss-20b-lora",
        "gpt-oss-20b-lora-eager",
        "gpt-oss-20b-lora-1x32768",
        "deepseek-v2-lite-lora",
        "qwen1.5-moe-a2.7b-lora",
        "granite-3.1-3b-a800m-experts-unchecked",
        "llama-3-8b-full-lomo",
        "llama-3-8b-lora-1x8192",
    ),
    "near-the-line": ("mixtral-8x7b-router-24x2048", "gpt-oss-20b-lora-1x127488"),
    "newer": (
        "gemma-4-26b-a4b-lora",
        "glm-4.7-flash-lora",
        "nemotron-3-nano-30b-a3b-lora",
        "qwen3.5-35b-a3b-lora",
        "ernie-4.5-21b-a3b-lora",
        "lfm2-8b-a1b-lora",
        "kimi-linear-48b-a3b-lora",
        "qwen3-next-80b-a3b-lora",
    ),
    "large": ("minimax-m2.5-router", "deepseek-v3.2-router-host"),
}
"""The cases in parts that each take less than nine minutes of a GPU, most telling first."""


def run_on_cuda(name: str, cap: int | None) -> dict[str, Any]:
    """One case in this process: predicted as before a run, measured, and predicted with what its experts received."""
    config, device = CUDA_CASES[name](), torch.device("cuda", 0)
    steps = CUDA_STEPS
    if nullcuda.is_present():
        steps, config = 2, for_null_device(config)
    row = {"case": name, **claim(device, cap)}
    row["predicted_before"] = before = predicted_on_cuda(config, row["device"], BALANCED)
    row["fits"] = before["with_loading"] <= row["usable"]
    try:
        with answering():
            measured = measure(resolve(config, "cuda"), device, steps=steps)
    except torch.OutOfMemoryError as error:
        frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        row["out_of_memory"] = {"loading": "build" in frames, "message": str(error)}
        return row | {"predicted": before, "measured": None}
    # on the null device all experts received as many: nothing else is known than before
    known = before if nullcuda.is_present() else predicted_on_cuda(config, row["device"], measured.routing)
    return row | {
        "predicted": known,
        "measured": {kind: getattr(measured, f"peak_{kind}") for kind in BYTES},
        "fullest_expert": fullest_expert(measured),
        "tokens_per_second": round(measured.tokens_per_second, 1),
    }


def predict_again(file: Path) -> None:
    """Writes what is predicted now into a report of the null device, beside what was measured then; there routing is
    balanced, so that nothing else is known of it."""
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["null_device"], f"{file}: on a card, predictions use the routing of its steps"
    for row in report["cases"]:
        config = for_null_device(CUDA_CASES[row["case"]]())
        row["predicted"] = row["predicted_before"] = predicted_on_cuda(config, row["device"], BALANCED)
        row["predicted_by"] = commit()
    write_json(report, file)


def for_null_device(config: RunConfig) -> RunConfig:
    """No time is taken there: micro-steps after the second take the same memory."""
    accumulate = min(2, config.train.accumulate)
    return config.model_copy(update={"train": config.train.model_copy(update={"accumulate": accumulate})})


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
    card = {
        "name": properties.name,
        "memory": total,
        "capability": [properties.major, properties.minor],
        "cuda": torch.version.cuda,
    }
    return {"device": card, "outside_before": outside, "usable": usable}


def predicted_on_cuda(config: RunConfig, card: dict[str, Any], routing: AssumedRouting) -> dict[str, int]:
    """Bytes on this card; `with_loading` is the most that the process takes, loading included, and from `low` to `high`
    the range of it."""
    report = predict(resolve(config, "cuda"), gpu=catalog_name(card), routing=routing)
    peaks = {kind: getattr(report.fullest, f"peak_{kind}") for kind in BYTES}
    return peaks | {"with_loading": report.peak_process, "low": report.span.low, "high": report.span.high}


def catalog_name(card: dict[str, Any]) -> str:
    """The card as `find_gpu` knows it, or its size."""
    try:
        return find_gpu(card["name"]).name
    except UserError:
        return f"{card['memory']}B"


def in_own_process(name: str, cap: int | None, *more: str) -> dict[str, Any]:
    """`run_on_cuda` in a new process: a peak of its own, and an error of its own, which becomes `failed`."""
    command = [sys.executable, __file__, "--device", "cuda", "--case", name, "--json-line", *more]
    command += [] if cap is None else ["--cap", f"{cap}B"]
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


# --- Commands and TRL's trainers ------------------------------------------------------------------------------


def command_cases() -> dict[str, Callable[[Path], tuple[int, int]]]:
    """What command_peaks.py compares; it needs TRL, which the other cases do not."""
    import command_peaks

    train = {"micro_batch": 2, "sequence_length": 1024, "accumulate": 2}
    return command_peaks.cases(catalog_run("mixtral-8x7b", LORA_16, train=train))


def run_command(name: str) -> dict[str, Any]:
    """One command in this process."""
    with tempfile.TemporaryDirectory() as folder, answering():
        predicted, measured = command_cases()[name](Path(folder))
    return {"case": name, "predicted": predicted, "measured": measured}


def run_commands(names: Iterable[str]) -> dict[str, Any]:
    """Runs each command in a process of its own; returns everything that the JSON holds."""
    rows = []
    for name in names:
        rows.append(in_own_process(name, None, "--commands") | {"commit": commit()})
        print(rows[-1], flush=True)
    card = claim(torch.device("cuda", 0), None)["device"]
    packages = versions("torch", "transformers", "trl", "bitsandbytes")
    return {
        "schema": 1,
        "benchmark": "predict_vs_measured_commands",
        "versions": packages,
        "device": card,
        "cases": rows,
    }


def commands_table(report: dict[str, Any]) -> Iterator[str]:
    """Markdown: each command's bytes as predicted and measured."""
    yield "| command | predicted | measured | off by |"
    yield "|---|---:|---:|---:|"
    for row in report["cases"]:
        predicted, measured = row.get("predicted"), row.get("measured")
        unit = GiB if (measured or 0) > 10 * GiB else MiB
        yield f"| {row['case']} | {size(predicted, unit)} | {size(measured, unit)} | {off(predicted, measured)} |"
    made = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield f"\nCommits {', '.join(sorted({str(row['commit'])[:12] for row in report['cases']}))}; {made}."


# --- The report -----------------------------------------------------------------------------------------------


def off(predicted: int | None, measured: int | None) -> str:
    return "–" if predicted is None or measured is None else f"{100 * (predicted / measured - 1):+.2f} %"


def size(count: int | None, unit: int) -> str:
    return "–" if count is None else f"{count / unit:,.2f} {'GiB' if unit == GiB else 'MiB'}"


def cpu_table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Markdown, a line at a time, each as soon as its case is done; predictions by how far they are off."""
    ways = [("trace", way) for way in ("as_routed", "fullest", "balanced", "worst")]
    heads = " | ".join(f"{method}, {way.replace('_', ' ')}" for method, way in ways)
    yield f"| case | optimizer | fullest expert | measured | {heads} |"
    yield "|---|---|" + "---:|" * (2 + len(ways))
    for row in rows:
        fullest = "–" if row["fullest_expert"] is None else f"{row['fullest_expert']:.1f}×"
        offs = [off(row[method][way], row["measured"]) for method, way in ways]
        yield f"| {' | '.join([row['case'], row['optimizer'], fullest, size(row['measured'], MiB), *offs])} |"


def cuda_table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Markdown as `cpu_table`: each kind of bytes as predicted, measured and off by, then the verdict."""
    yield "| case |" + "".join(f" {kind}: predicted | measured | off by |" for kind in BYTES) + " verdict |"
    yield "|---|" + "---:|" * 9 + "---|"
    for row in rows:
        cells = [row["case"]]
        for kind in BYTES:
            predicted, measured = ((row.get(side) or {}).get(kind) for side in ("predicted", "measured"))
            cells += [size(predicted, GiB), size(measured, GiB), off(predicted, measured)]
        yield f"| {' | '.join([*cells, verdict(row)])} |"


def run(device: str, names: list[str], cap: int | None, file: Path | None = None) -> dict[str, Any]:
    """Runs the cases, prints the table, and returns everything that the JSON holds, which is written after each."""
    on_cuda = device == "cuda"
    rows = rows_of(file if on_cuda else None, "case")
    now = commit()

    def report() -> dict[str, Any]:
        cards = [row["device"] for row in rows.values() if "device" in row]
        assert all(card["name"] == cards[0]["name"] for card in cards), f"{file}: cases of another card"
        return {
            "schema": 1,
            "benchmark": "predict_vs_measured",
            "versions": versions("moetune", "torch", "transformers", "peft", "bitsandbytes"),
            "device": (cards or [None])[0] if on_cuda else {"name": cpu_name(), "threads": torch.get_num_threads()},
            "commit": now,
            "steps": CUDA_STEPS if on_cuda else CPU_STEPS,
            "cap": cap,
            "null_device": nullcuda.is_present(),
            "cases": [*rows.values()],
        }

    def results() -> Iterator[dict[str, Any]]:
        for name in names:
            if (name,) not in rows or rows[name,]["commit"] != now:
                row = in_own_process(name, cap) if on_cuda else run_on_cpu(CPU_CASES[name])
                rows[name,] = row | {"commit": now}
                if file is not None:
                    write_json(report(), file)
            yield rows[name,]

    for line in (cuda_table if on_cuda else cpu_table)(results()):
        print(line, flush=True)
    return report()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default CUDA where there is any")
    parser.add_argument("--cases", help=f"comma-separated names, or on CUDA of parts: {', '.join(PARTS)}; default all")
    parser.add_argument("--cap", metavar="SIZE", help="on CUDA: as if the card had this much, such as 44GiB")
    parser.add_argument("--predict-again", type=Path, metavar="FILE", help="of the null device: predict anew")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--commands", action="store_true", help="on the null device: TRL's trainers, and commands")
    parser.add_argument("--case", help="on CUDA: run this one in this process")
    parser.add_argument("--json-line", action="store_true", help="with --case: print its numbers as one line of JSON")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    known: dict[str, Any] = command_cases() if options.commands else CUDA_CASES
    known = known if options.device == "cuda" else CPU_CASES
    named = options.cases.split(",") if options.cases else [options.case] if options.case else list(known)
    options.cases = [case for name in named for case in (PARTS.get(name, (name,)) if known is CUDA_CASES else (name,))]
    if unknown := [name for name in options.cases if name not in known]:
        parser.error(f"unknown on {options.device}: {', '.join(unknown)}; there are {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    try:
        options.cap = None if options.cap is None else find_gpu(options.cap).memory.value
    except UserError as error:
        parser.error(f"--cap: {error}")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.predict_again is not None:
        predict_again(options.predict_again)
        return
    if options.commands and not options.json_line:
        peaks = run_commands(options.cases)
        if options.json is not None:
            write_json(peaks, options.json)
            write_table(commands_table(peaks), options.json.with_suffix(".md"))
        return
    if options.commands:
        print(json.dumps(run_command(options.cases[0])))
        return
    if options.device == "cuda" and options.json_line:
        print(json.dumps(run_on_cuda(options.cases[0], options.cap)))
        return
    report = run(options.device, options.cases, options.cap, options.json)
    if options.device == "cuda" and any(map(is_wrong, report["cases"])):
        sys.exit(1)


if __name__ == "__main__":
    main()
