"""A hybrid's micro-step with transformers' own scans and with flash-linear-attention's: time, and memory beside what is
predicted.

    python scripts/bench/hybrids.py [--models MODEL...] [--layers 8] [--json FILE]

LoRA r16 on attention and experts, NF4, bfloat16, full checkpointing, 2 rows of 4096 tokens of 2 or 16 documents each,
as many layers as are asked for. Linear attention runs by transformers' own code document by document (`torch`), by the
package's kernels document by document (`one by one`), and by these on all documents at once (`at once`, what `moetune
train` does where the package is installed and works). Needs CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from _common import ROOT, commit, versions, write_json

from moetune.adapt import documents
from moetune.adapt.attention import document_inputs
from moetune.adapt.build import Adapted, build
from moetune.compat.transformers import scans_of, without_packages
from moetune.config.schema import RunConfig
from moetune.memory.measurement.measure import catalog_name
from moetune.models.catalog import find_model
from moetune.models.catalog.gpus import find_gpu
from moetune.models.stack import decoder_layers
from moetune.planning.predict import predict
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.step.batch import Batch, collate
from moetune.training.step.micro_step import count_loss_tokens, micro_step
from moetune.training.step.router_losses import RouterWatch

sys.path.insert(0, str(ROOT))
from tests.nullcuda import device as nullcuda

ROWS, LENGTH = 2, 4096
WARM_UP = 2


def run_of(folder: Path, model: str, layers: int) -> ResolvedRun:
    entry = find_model(model)
    assert entry is not None
    config = entry.config | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    train = {"micro_batch": ROWS, "accumulate": 1, "sequence_length": LENGTH}
    run = {
        "model": {"path": str(folder), "weights": "random", "dtype": "bf16"},
        "adapt": {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}},
        "optimizer": {"name": "adamw8bit"},
        "train": train,
    }
    return resolve(RunConfig.model_validate(run), "cuda")


def batch_of(adapted: Adapted, count: int) -> Batch:
    """Rows of `count` documents of equal length."""
    draw, size = np.random.default_rng(0), LENGTH // count
    ids = draw.integers(0, adapted.model.config.vocab_size, (ROWS, LENGTH))
    positions = np.tile(np.arange(size), count)
    rows = [
        {"input_ids": row, "labels": row, "position_ids": positions, "is_token": np.ones_like(positions)} for row in ids
    ]
    batch = collate(rows, 0, document_inputs=document_inputs(adapted.model))
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()}


def ways(adapted: Adapted) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """The first alone where no package is installed, or none works on this card (`moetune/adapt/packages.py`)."""
    yield "torch", without_packages(adapted.model)
    modules = [one for layer in decoder_layers(adapted.model).values() for one in documents.modules_with_state(layer)]
    if not any(scan.is_kernel() for module in modules for scan in scans_of(module)):
        return
    yield "one by one", patch.object(documents, "_takes_documents", lambda module: False)
    yield "at once", nullcontext()


def measured(adapted: Adapted, update: Callable[[], Any], batch: Batch, repetitions: int) -> dict[str, Any]:
    """Seconds of a micro-step, the most that was allocated with its update, and its loss."""
    watch, tokens, seconds = RouterWatch(adapted), count_loss_tokens(batch), []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + repetitions):
        start = time.perf_counter()
        loss = micro_step(adapted.model, batch, tokens, watch, adapted.run.config.train).loss
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        update()
        adapted.model.zero_grad()
    return {
        "seconds": median(seconds[WARM_UP:]),
        "all": seconds,
        "allocated": torch.cuda.max_memory_allocated(),
        "loss": float(loss),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-next-80b-a3b", "kimi-linear-48b-a3b"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    report = {
        "schema": 1,
        "benchmark": "hybrids",
        "device": torch.cuda.get_device_name(),
        "versions": versions("torch", "triton", "transformers", "flash-linear-attention", "moetune"),
        "commit": commit(),
        "cases": [],
    }
    print("| model | layers | documents a row | scans | micro-step | tokens/s | allocated | predicted | loss |")
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|")
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(Path(folder), model, options.layers)
            card = find_gpu(catalog_name(torch.device("cuda")))
            predicted = predict(run, gpu=card).fullest.peak_allocated
            adapted = build(run, "cuda")
        adapted.model.train()
        optimizer = make_optimizer(adapted)
        for count in (2, 16):
            batch = batch_of(adapted, count)
            for way, context in ways(adapted):
                with context, nullcuda.answering() if nullcuda.is_present() else nullcontext():
                    row = measured(adapted, optimizer.step, batch, options.repetitions)
                seconds, found = row["seconds"], row["allocated"] / 2**30
                cells = [model, options.layers, count, way, f"{seconds:.3f} s", f"{ROWS * LENGTH / seconds:,.0f}"]
                cells += [f"{found:.2f} GiB", f"{predicted / 2**30:.2f} GiB", f"{row['loss']:.4f}"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
                report["cases"].append({"model": model, "documents": count, "way": way, "predicted": predicted} | row)
                if options.json is not None:
                    write_json(report, options.json)


if __name__ == "__main__":
    main()
