"""Where the time of a step goes: the kernels of one layer's experts and of one step, by time on the GPU.

    python scripts/bench/profile_step.py [--models MODEL...] --json profile_step.json

Two layers of each model, random weights, LoRA r16 on attention and experts, NF4, bfloat16; 2 × 2048 tokens. `bank` is
one layer's experts, forward and backward; `step` both layers, embedding and head. Each is run twice before it is looked
at. `asked` is how long the host takes until it has asked for all of it, `seconds` until the device has done it, without
the profiler: where they are alike, the step waits for the host. Without a GPU, or on the null device, the host's time
is shown instead.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import commit, versions, write_json
from predict_vs_measured import LORA_16, answering, catalog_run, nullcuda
from torch.profiler import ProfilerActivity, profile

from moetune.adapt.build import build
from moetune.models.catalog import find_model
from moetune.run.resolve import resolve

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
LAYERS, ROWS, LENGTH, SHOWN, TIMES = 2, 2, 2048, 25, 5


def built(model: str, folder: Path, device: torch.device) -> Any:
    """Two layers of a model, adapted."""
    entry = find_model(model)
    assert entry is not None
    config = copy.deepcopy(entry.config) | {"num_hidden_layers": LAYERS}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run = resolve(catalog_run(str(folder), LORA_16, model={"dtype": "bf16"}), device.type)
    return build(run, device)


def profiled(work: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """The operations and kernels that took longest, in microseconds, with how often they ran."""
    sees_kernels = device.type == "cuda" and not nullcuda.is_present()
    for _ in range(2):
        work()
    found = {"timed": timed(work, device), "time_of": "device" if sees_kernels else "host"}
    if sees_kernels:
        found |= _longest(work, ProfilerActivity.CUDA) | {"host": _longest(work, ProfilerActivity.CPU)}
    else:
        found |= _longest(work, ProfilerActivity.CPU)
    return found


def timed(work: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Seconds until the work was asked for and until it was done, medians."""
    asked, done = [], []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        asked.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done.append(time.perf_counter() - start)
    return {"asked": median(asked), "seconds": median(done)}


def _longest(work: Callable[[], None], activity: ProfilerActivity) -> dict[str, Any]:
    with profile(activities=[activity]) as seen:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    by = "self_device_time_total" if activity is ProfilerActivity.CUDA else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: -getattr(event, by))
    return {
        "total": round(sum(getattr(event, by) for event in events)),
        "launches": sum(event.count for event in events),
        "longest": [{"name": e.key, "count": e.count, "time": round(getattr(e, by))} for e in events[:SHOWN]],
    }


def profile_of(name: str, device: torch.device) -> dict[str, Any]:
    """Of a model: one layer's experts, and a step."""
    with tempfile.TemporaryDirectory() as folder:
        adapted = built(name, Path(folder), device)
    model = adapted.model.train()
    bank = model.get_submodule(adapted.structure.moe_layers[0].experts)
    shape, tokens = bank.expert_shape, ROWS * LENGTH
    chosen = model.config.num_experts_per_tok
    x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(tokens * chosen, device=device).remainder(shape.num_experts).view(tokens, chosen)
    weights = torch.full((tokens, chosen), 1 / chosen, device=device, dtype=torch.bfloat16)
    batch = torch.randint(1000, (ROWS, LENGTH), device=device)

    def step() -> None:
        model(batch, labels=batch, use_cache=False).loss.backward()

    return {
        "bank": profiled(lambda: bank(x, ids, weights).sum().backward(), device),
        "step": profiled(step, device),
    }


def show(name: str, part: dict[str, Any]) -> None:
    what, clock = part["time_of"], part["timed"]
    print(
        f"{name}: {part['total'] / 1000:.1f} ms of the {what}, {part['launches']} "
        f"{'launches' if what == 'device' else 'operations'}; "
        f"asked in {1000 * clock['asked']:.1f} ms, done in {1000 * clock['seconds']:.1f}"
    )
    for row in part["longest"]:
        print(f"  {row['time'] / 1000:9.2f} ms  {row['count']:6}  {row['name'][:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], metavar="MODEL", help="of the catalog")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with answering():
        models = {name: profile_of(name, device) for name in options.models}
    for name, parts in models.items():
        for part, found in parts.items():
            show(f"{name}, {part}", found)
            if "host" in found:
                show(f"{name}, {part}", found["host"] | {"time_of": "host", "timed": found["timed"]})
    if options.json is not None:
        report = {"schema": 2, "benchmark": "profile_step", "commit": commit()}
        write_json(report | {"versions": versions("moetune", "torch", "bitsandbytes"), "models": models}, options.json)


if __name__ == "__main__":
    main()
