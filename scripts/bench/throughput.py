"""Tokens a second of real training steps beside peers', on the same weights.

    python scripts/bench/throughput.py --json throughput_peers.json     a few layers of three models
    python scripts/bench/throughput.py --small                          a minute, on any machine

A step is forward, backward and update (8-bit AdamW, full checkpointing) of one micro-batch, whose tokens grow from run
to run in one process per side: out of memory is a row, not the end. All sides train LoRA of the same rank on attention
and all experts, on a checkpoint of a few layers that all read:

- PEFT: the model as transformers loads it, in 16 bit, because transformers packs no stacked experts, with
  `target_parameters`.
- experts4bit-qlora, if it is installed with its kernels (`pip install "experts4bit-qlora[train,fast]"`) and there is a
  GPU: experts in NF4 as its loader packs them, its own factors, its fast path. Not measured so yet.

Unsloth is no side: it could not be run where this was written. The losses of the first step are in the table; factors
start at zero there, so that sides differ by how weights are stored. A side that trains another number of weights has
failed. Whole models are timed by host_time.py (`done`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import LORA_16, commit, config_of, versions, write_json
from predict_vs_measured import GiB, answering, catalog_run, nullcuda
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from moetune.adapt.build import build
from moetune.config.schema import OptimizerConfig
from moetune.memory.trace.steps import batches_of
from moetune.run.resolve import resolve
from moetune.training.optim.optimizers import make_optimizer, optimizer_maker
from moetune.training.step.batch import Batch
from moetune.training.step.micro_step import count_loss_tokens, token_loss
from moetune.training.step.stepper import Stepper

LENGTH = 4096
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
MODELS = {"mixtral-8x7b": 4, "qwen3-30b-a3b": 8, "olmoe-1b-7b": 8}
"""Catalog model -> layers."""
SMALL = {"hidden_size": 256, "intermediate_size": 896, "vocab_size": 2048, "head_dim": 32, "num_attention_heads": 8}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WARM_UP = 2


@dataclass(frozen=True)
class Side:
    """`step` takes ids [rows, length], and returns the loss; gradients are there then."""

    model: nn.Module
    step: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer

    @property
    def trained(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)


def on(device: torch.device, batch: Batch) -> Batch:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}


def moetune(folder: Path, device: torch.device, dtype: torch.dtype) -> Side:
    about = {"weights": "pretrained", "dtype": "fp32" if dtype == torch.float32 else "bf16"}
    train = {"micro_batch": 1, "accumulate": 1, "sequence_length": LENGTH}
    adapted = build(resolve(catalog_run(str(folder), LORA_16, model=about, train=train), device.type), device)
    adapted.model.train()
    stepper = Stepper(adapted, make_optimizer(adapted))

    def step(ids: Tensor) -> Tensor:
        batch = batches_of(adapted, ids.shape[1])(len(ids)) | {"input_ids": ids, "labels": ids.clone()}
        return stepper.micro_step(on(device, batch), count_loss_tokens(batch)).loss

    return Side(adapted.model, step, stepper.optimizer)


def peft(folder: Path, device: torch.device, dtype: torch.dtype) -> Side:
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    config = LoraConfig(
        r=LORA_16["lora"]["rank"],
        lora_alpha=LORA_16["lora"]["alpha"],
        target_modules=ATTENTION,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return plain(get_peft_model(model, config), device)


def experts4bit(folder: Path, device: torch.device, dtype: torch.dtype) -> Side:
    import experts4bit_qlora as theirs

    lora = LORA_16["lora"]
    model, _ = theirs.load_moe_4bit_streaming(str(folder), str(device), dtype, r=lora["rank"], alpha=lora["alpha"])
    theirs.verify_moe_4bit(model, strict=True)
    theirs.lora.add_attention_lora(model, lora["rank"], lora["alpha"], dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name.lower())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # kernels too old for `dgrad` are only a warning there
        patched = theirs.enable_fast_train(model, dgrad=True)
    assert patched > 0, "enable_fast_train changed no module: grouped-nf4-gemm is missing"
    return plain(model, device)


def plain(model: Any, device: torch.device) -> Side:
    """A peer's model with the loss and the optimizer of this project, so that the rest is what differs."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step(ids: Tensor) -> Tensor:
        batch = on(device, {"input_ids": ids, "labels": ids.clone()})
        loss = token_loss(model, batch) / count_loss_tokens(batch)
        loss.backward()
        return loss.detach()

    return Side(model, step, optimizer_maker(OptimizerConfig(name="adamw8bit"))(trained))


SIDES = {"moetune": moetune, "peft": peft, "experts4bit": experts4bit}


# --- One side, in a process of its own ------------------------------------------------------------------------


def write_checkpoint(model: str, folder: Path, small: bool) -> None:
    """So many layers with random weights, as the hub has them."""
    config = config_of(model, MODELS[model]) | (SMALL if small else {})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        dtype = torch.float32 if small else torch.bfloat16
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).save_pretrained(folder)


def run_side(name: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Its rows, one for each number of tokens; ends early where they have taken too long, loading aside."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = SIDES[name](folder, device, torch.float32 if options.small else torch.bfloat16)
    began = time.perf_counter()
    for tokens in options.tokens:
        row: dict[str, Any] = {"side": name, "tokens": tokens, "trained": side.trained}
        if time.perf_counter() - began > options.seconds:
            yield row | {"left_out": f"{options.seconds:.0f} s were over"}
            continue
        try:
            yield row | timed(side, tokens, device, options.repetitions)
        except torch.OutOfMemoryError as error:
            yield row | {"left_out": f"out of memory: {str(error).split('. ')[0]}"}
            side.model.zero_grad()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def timed(side: Side, tokens: int, device: torch.device, repetitions: int) -> dict[str, Any]:
    """Seconds of steps after the first ones, the first one's loss, and the most that the allocator gave."""
    rows, on_cuda = max(1, tokens // LENGTH), device.type == "cuda"
    vocabulary, same = side.model.config.vocab_size, torch.Generator().manual_seed(0)  # for all sides
    ids = torch.randint(vocabulary, (rows, tokens // rows), generator=same)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds, losses = [], []
    for _ in range(WARM_UP + repetitions):
        began = time.perf_counter()
        losses.append(side.step(ids))
        side.optimizer.step()
        side.optimizer.zero_grad()
        if on_cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    taken = median(seconds[WARM_UP:])
    row = {"seconds": taken, "all": seconds, "tokens_per_second": tokens / taken, "loss": float(losses[0])}
    return row | ({"allocated": torch.cuda.max_memory_allocated(device)} if on_cuda else {})


# --- All sides ------------------------------------------------------------------------------------------------


def in_own_process(name: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a side, as they are measured; one that says why where there are none."""
    command = [sys.executable, __file__, "--side", name, "--folder", folder, *["--small"] * options.small]
    command += ["--repetitions", options.repetitions, "--seconds", options.seconds, "--tokens", *options.tokens]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith('{"side"'))
        if process.wait() != 0:
            errors.seek(0)
            yield {"side": name, "failed": (errors.read().strip().splitlines() or ["no answer"])[-1]}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of all sides of all models. One that trains more or fewer numbers than the first of a model has failed."""
    for model in options.models:
        with tempfile.TemporaryDirectory() as parent:
            write_checkpoint(model, folder := Path(parent) / model, options.small)
            first = None
            for row in (row for side in SIDES for row in in_own_process(side, folder, options)):
                first = first or row.get("trained")
                if row.get("trained", first) != first:
                    row["failed"] = f"trains {row['trained']:,} numbers, the side before {first:,}"
                yield {"model": model, "layers": MODELS[model], **row}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown. `×` is our tokens/s over the side's, on the same checkpoint."""
    ours = {(row["model"], row["tokens"]): row for row in rows if row["side"] == "moetune" and "seconds" in row}
    lines = ["| model | layers | side | tokens a step | tokens/s | peak | loss | moetune is |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        about = f"| {row['model']} | {row['layers']} | {row['side']} | {row.get('tokens', '')} |"
        if "failed" in row or "seconds" not in row:
            lines.append(f"{about} {row.get('failed') or row['left_out']} ||||")
            continue
        peak = f"{row['allocated'] / GiB:.1f} GiB" if "allocated" in row else "–"
        our = None if row["side"] == "moetune" else ours.get((row["model"], row["tokens"]))
        times = "" if our is None else f"{our['tokens_per_second'] / row['tokens_per_second']:.2f}×"
        lines.append(f"{about} {row['tokens_per_second']:,.0f} | {peak} | {row['loss']:.3f} | {times} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, help="by default all; with --small the first")
    parser.add_argument("--small", action="store_true", help="a narrow model in float32, on any machine")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step; by default 1k to 32k")
    parser.add_argument("--repetitions", type=int, default=3, help="timed steps of each")
    parser.add_argument("--seconds", type=float, default=150, help="after which a side begins no larger step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.models = options.models or [*MODELS][: 1 if options.small else None]
    options.tokens = sorted(options.tokens or ((128, 256) if options.small else TOKENS))
    on_cuda = torch.cuda.is_available()
    if not options.small and not on_cuda:
        parser.error("there is no CUDA device; --small runs without one")
    if options.side is not None:
        with answering():
            for row in run_side(options.side, options.folder, options):
                print(json.dumps(row), flush=True)
        return
    report = {
        "schema": 1,
        "benchmark": "throughput",
        "versions": versions("moetune", "torch", "transformers", "peft", "bitsandbytes", "experts4bit-qlora"),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "null_device": nullcuda.is_present(),
        "commit": commit(),
        "cases": [],
    }
    for row in run(options):
        report["cases"].append(row)
        lines = table(report["cases"])
        print("\n".join(lines if len(lines) == 3 else lines[-1:]), flush=True)
        if options.json is not None:  # after each row: a lent machine may be taken away
            write_json(report, options.json)
    if any("ModuleNotFoundError" not in row.get("failed", "ModuleNotFoundError") for row in report["cases"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
