"""Where the time of a step goes: the kernels of one layer's experts and of one step, by time on the GPU.

    python scripts/bench/profile_step.py --json profile_step.json

Two layers of Mixtral-8x7B, random weights, LoRA r16 on attention and experts, NF4, bfloat16; 2 × 2048 tokens. `bank` is
one layer's experts, forward and backward; `step` both layers, embedding and head. Each is run twice before it is looked
at. Without a GPU, or on the null device, the host's time is shown instead.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import commit, versions, write_json
from predict_vs_measured import LORA_16, answering, catalog_run, nullcuda
from torch.profiler import ProfilerActivity, profile

from moetune.adapt.build import build
from moetune.models.catalog import find_model
from moetune.run.resolve import resolve

LAYERS, ROWS, LENGTH, SHOWN = 2, 2, 2048, 25


def built(folder: Path, device: torch.device) -> Any:
    """The model of the docstring, adapted."""
    entry = find_model("mixtral-8x7b")
    assert entry is not None
    config = copy.deepcopy(entry.config) | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run = resolve(catalog_run(str(folder), LORA_16, model={"dtype": "bf16"}), device.type)
    return build(run, device)


def profiled(work: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """The operations and kernels that took longest, in microseconds, with how often they ran."""
    sees_kernels = device.type == "cuda" and not nullcuda.is_present()
    for _ in range(2):
        work()
    with profile(activities=[ProfilerActivity.CUDA] if sees_kernels else [ProfilerActivity.CPU]) as seen:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    by = "self_device_time_total" if sees_kernels else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: -getattr(event, by))
    return {
        "time_of": "device" if sees_kernels else "host",
        "total": round(sum(getattr(event, by) for event in events)),
        "launches": sum(event.count for event in events) if sees_kernels else None,
        "longest": [{"name": e.key, "count": e.count, "time": round(getattr(e, by))} for e in events[:SHOWN]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with answering(), tempfile.TemporaryDirectory() as folder:
        adapted = built(Path(folder), device)
        model = adapted.model.train()
        bank = model.get_submodule(adapted.structure.moe_layers[0].experts)
        shape, tokens = bank.expert_shape, ROWS * LENGTH
        x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.arange(tokens * 2, device=device).remainder(shape.num_experts).view(tokens, 2)
        weights = torch.full((tokens, 2), 0.5, device=device, dtype=torch.bfloat16)
        batch = torch.randint(1000, (ROWS, LENGTH), device=device)

        def step() -> None:
            model(batch, labels=batch, use_cache=False).loss.backward()

        parts = {
            "bank": profiled(lambda: bank(x, ids, weights).sum().backward(), device),
            "step": profiled(step, device),
        }
    for name, part in parts.items():
        print(f"{name}: {part['total'] / 1000:.1f} ms of the {part['time_of']}, {part['launches']} launches")
        for row in part["longest"]:
            print(f"  {row['time'] / 1000:9.2f} ms  {row['count']:6}  {row['name'][:100]}")
    if options.json is not None:
        report = {"schema": 1, "benchmark": "profile_step", "commit": commit()}
        write_json(report | {"versions": versions("moetune", "torch", "bitsandbytes"), **parts}, options.json)


if __name__ == "__main__":
    main()
