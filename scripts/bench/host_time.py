"""The host's time of a micro-step: what a step costs before any kernel has run.

    python scripts/bench/host_time.py [--expert-memory SIZE...] [--checkpointing full auto] [--rows 8] [--json FILE]
    python scripts/bench/host_time.py --checkpointing auto --beside ../before --json FILE

Full-size models with random weights, LoRA r16 on attention and experts, NF4, bfloat16, rows of 2048 tokens.
`--checkpointing auto` keeps what fits a card of `--gpu`. A micro-step is timed from its start until the backward pass
has been asked for, as wall time and as the time that the process worked, autograd's threads included; the device is
waited for before and after (`done`). Where the host is slower than the device, this is how long a step takes. On a null
device (tests/nullcuda), whose kernels take no time, both numbers are the host's alone, and `waits` is how often the
host waits for it in the last micro-step. On a card they have its waits for the device in them: CUDA waits by looking
again and again.

`seconds` is the median of the micro-steps after `WARM_UP`, which load kernels and make the routers' buffers.

`--beside` names a worktree of another commit: a process of each tree (host_time_turns.py) takes micro-steps in turn, so
that both meet the same machine. Their CPU time is compared: `ratio` is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _common import ROOT, commit, lora_run, versions, write_json

from moetune.adapt.build import build
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.trace.steps import batches_of
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.settle import settled
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.step.micro_step import count_loss_tokens, forward_pass
from moetune.training.step.router_losses import RouterWatch

sys.path.insert(0, str(ROOT))
from tests.nullcuda import device as nullcuda

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b")
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """What is timed; `checkpointing: auto` keeps what fits a card of `gpu`."""

    model: str
    layers: int | None = None
    expert_memory: str = "auto"
    checkpointing: str = "full"
    rows: int = 2
    gpu: str = "44GiB"


def run_of(folder: Path, case: Case) -> ResolvedRun:
    train = {
        "micro_batch": case.rows,
        "accumulate": 1,
        "sequence_length": 2048,
        "expert_memory": case.expert_memory,
        "checkpointing": case.checkpointing,
    }
    run = lora_run(folder, case.model, case.layers, train)
    return settled(resolve(run, "cuda"), find_gpu(case.gpu), BALANCED)


def micro_step(*given: Any) -> None:
    forward_pass(*given)[0].backward()


def host_time(case: Case, repetitions: int) -> dict[str, Any]:
    """Seconds of each micro-step: until it is asked for, until it is done, and of the process's work."""
    gc.collect()  # the model before this one has reference cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(Path(folder), case)
        adapted = build(run, "cuda")
    adapted.model.train()
    watch = RouterWatch(adapted)
    batch = batches_of(adapted)(case.rows)
    batch |= {name: value.cuda() for name, value in batch.items() if torch.is_tensor(value)}
    tokens = count_loss_tokens(batch)
    seconds, done, worked, waits = [], [], [], 0
    for _ in range(WARM_UP + repetitions):
        torch.cuda.synchronize()
        start, start_worked = time.perf_counter(), time.process_time()
        before = nullcuda.asked() if nullcuda.is_present() else None
        micro_step(adapted.model, batch, tokens, watch, run.config.train)
        waits = 0 if before is None else (nullcuda.asked() - before).synchronizations
        seconds.append(time.perf_counter() - start)
        worked.append(time.process_time() - start_worked)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - start)
        adapted.model.zero_grad()
    seconds, done, worked = seconds[WARM_UP:], done[WARM_UP:], worked[WARM_UP:]
    return asdict(case) | {
        "layers": adapted.model.config.num_hidden_layers,
        "tokens": int(tokens),
        "waits": waits if nullcuda.is_present() else None,
        "allocated": torch.cuda.max_memory_allocated(),
        "seconds": {"median": median(seconds), "all": seconds},
        "done": {"median": median(done), "all": done},
        "worked": {"median": median(worked), "all": worked},
    }


def in_turns(case: Case, other: Path, pairs: int) -> dict[str, Any]:
    """CPU seconds of micro-steps of this tree and of another, in turn, the median of their ratios, and the waits of
    each tree's last one."""
    options = [case.model, str(case.layers or 0), case.expert_memory, case.checkpointing, str(case.rows)]
    command = [sys.executable, "-P", str(ROOT / "scripts/bench/host_time_turns.py"), *options]
    trees = {"before": other.resolve(), "now": ROOT}
    processes = {
        name: subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": f"{tree}:{tree}/scripts/bench"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, tree in trees.items()
    }
    worked: dict[str, list[float]] = {name: [] for name in trees}
    waits: dict[str, int] = {}
    for _ in range(WARM_UP + pairs):
        for name, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            print(file=process.stdin, flush=True)
            seconds, waited = process.stdout.readline().split()
            worked[name].append(float(seconds))
            waits[name] = int(waited)
    for process in processes.values():
        process.communicate()
    worked = {name: seconds[WARM_UP:] for name, seconds in worked.items()}
    ratio = median(now / before for now, before in zip(worked["now"], worked["before"], strict=True))
    return asdict(case) | {"ratio": ratio, "pairs": worked, "waits": waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--repetitions", type=int, default=5, help="timed micro-steps")
    parser.add_argument("--models", nargs="+", default=[*MODELS], metavar="MODEL", help="of the catalog")
    parser.add_argument("--expert-memory", nargs="+", default=["auto"], metavar="SIZE", help="train.expert_memory")
    parser.add_argument("--checkpointing", nargs="+", default=["full"], metavar="WHICH", help="train.checkpointing")
    parser.add_argument("--gpu", default="44GiB", metavar="CARD", help="that `checkpointing: auto` is to fit")
    parser.add_argument("--rows", type=int, default=2, help="of 2048 tokens")
    parser.add_argument("--layers", type=int, metavar="N", help="of a model, instead of all that it has")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="take turns with a worktree of another commit")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, nor a null one")
    major, minor = torch.cuda.get_device_capability()
    name = "null device" if nullcuda.is_present() else torch.cuda.get_device_name()
    report = {
        "schema": 1,
        "benchmark": "host_time",
        "device": f"{name}, capability {major}.{minor}",
        "versions": versions("torch", "transformers", "bitsandbytes", "moetune"),
        "commit": commit(),
        "cases": [],
    }
    columns = ["layers", "rows", "expert memory", "checkpointing", "asked for", "done", "of work", "waits", "peak"]
    if options.beside is not None:
        columns = ["layers", f"of work, {options.beside.name}", "now", "ratio", "waits"]
    print("| model |", " | ".join(columns), "|\n|---|" + "---:|" * len(columns))
    for model, size, which in product(options.models, options.expert_memory, options.checkpointing):
        case = Case(model, options.layers, size, which, options.rows, options.gpu)
        if options.beside is not None:
            row = in_turns(case, options.beside, options.repetitions)
            before, now = (median(row["pairs"][name]) for name in ("before", "now"))
            line = f"| {model} | {case.layers or 'all'} | {before:.3f} s | {now:.3f} s | {row['ratio']:.2f} |"
            line += f" {row['waits']['before']} → {row['waits']['now']} |"
        else:
            with nullcuda.answering() if nullcuda.is_present() else nullcontext():
                row = host_time(case, options.repetitions)
            times = " | ".join(f"{row[key]['median']:.3f} s" for key in ("seconds", "done", "worked"))
            peak = f"{row['allocated'] / 2**30:.2f} GiB"
            line = f"| {model} | {row['layers']} | {case.rows} | {size} | {which} | {times} | {row['waits']} | {peak} |"
        print(line, flush=True)
        report["cases"].append(row)
        if options.json is not None:
            write_json(report, options.json)


if __name__ == "__main__":
    main()
