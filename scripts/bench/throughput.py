"""Tokens a second of real training steps, by tokens a step; and of peers on the same weights.

    python scripts/bench/throughput.py --parts mixtral,fine --json throughput.json     moetune, whole models
    python scripts/bench/throughput.py --parts peers --json throughput_peers.json      a few layers, beside peers
    python scripts/bench/throughput.py --small                                         a minute, on any machine

A step is forward, backward and update (8-bit AdamW, full checkpointing) of one micro-batch, whose tokens grow from run
to run in one process per case: out of memory is a row, not the end. `share` is the arithmetic that the step does, as a
trace of it counts (recomputation included), over what a large product reaches on this device in the same process.

**Peers** train LoRA of the same rank on attention and all experts, on a checkpoint of a few layers that all sides read:

- PEFT: the model as transformers loads it, in 16 bit, because transformers packs no stacked experts, with
  `target_parameters`.
- experts4bit-qlora, if it is installed with its kernels (`pip install "experts4bit-qlora[train,fast]"`) and there is a
  GPU: experts in NF4 as its loader packs them, its own factors, its fast path. Not measured so yet.

Unsloth is no side: it could not be run where this was written. The losses of the first step are in the table; factors
start at zero there, so that sides differ by how weights are stored. A side that trains another number of weights has
failed.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import LORA_16, commit, config_of, seconds_of, versions, write_json
from predict_vs_measured import answering, catalog_run, nullcuda, shrunk
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from moetune.adapt.build import build
from moetune.config.schema import OptimizerConfig, RunConfig
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.trace import trace
from moetune.memory.trace.steps import batches_of
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve
from moetune.training.optim.optimizers import make_optimizer, optimizer_maker
from moetune.training.step.batch import Batch
from moetune.training.step.micro_step import count_loss_tokens, token_loss
from moetune.training.step.stepper import Stepper

GiB = 2**30
LENGTH = 4096
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
WAYS: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"router": "0-5", "experts": {"layers": "0-5", "ids": [0, 1]}},
    "lora": LORA_16,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WARM_UP = 2
E4B = ("experts4bit-qlora", "grouped-nf4-gemm")


@dataclass(frozen=True)
class Case:
    """What one process trains: of a catalog model so many layers (None: all), one way, by one side."""

    model: str
    way: str
    side: str = "moetune"
    layers: int | None = None


PARTS = {
    "mixtral": [Case("mixtral-8x7b", way) for way in WAYS],
    "fine": [Case(model, "lora") for model in ("qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b")],
    "peers": [
        Case(model, "lora", side, layers)
        for model, layers in (("mixtral-8x7b", 4), ("qwen3-30b-a3b", 8), ("olmoe-1b-7b", 8))
        for side in ("moetune", "peft", "experts4bit")
    ],
    "small": [Case("mixtral-8x7b", "lora", side, 2) for side in ("moetune", "peft")],
}


@dataclass(frozen=True)
class Side:
    """`step` takes a batch and gives its loss; `update` ends a step."""

    model: nn.Module
    step: Callable[[Batch], Tensor]
    update: Callable[[], None]
    batch: Callable[[int], Batch]
    config: Callable[[int], RunConfig] | None = None

    @property
    def trained(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)


# --- The sides ------------------------------------------------------------------------------------------------


def moetune(case: Case, model: str, device: torch.device, length: int, dtype: torch.dtype) -> Side:
    """A run file's way. gpt-oss has its published MXFP4."""
    about_model = {
        "dtype": "fp32" if dtype == torch.float32 else "bf16",
        "weights": "random" if model == case.model else "pretrained",
    }
    sections: dict[str, Any] = {"model": about_model}
    if case.model.startswith("gpt-oss"):
        about_model["base"] = "mxfp4"

    def config(tokens: int) -> RunConfig:
        rows = max(1, tokens // length)
        train = {"micro_batch": rows, "accumulate": 1, "sequence_length": tokens // rows}
        return catalog_run(model, WAYS[case.way], **sections, train=train)

    adapted = build(resolve(config(length), device.type), device)
    adapted.model.train()
    stepper = Stepper(adapted, make_optimizer(adapted))

    def batch(tokens: int) -> Batch:
        ids = random_ids(adapted.model, tokens, length)
        return batches_of(adapted, ids.shape[1])(len(ids)) | {"input_ids": ids, "labels": ids.clone()}

    def step(batch: Batch) -> Tensor:
        return stepper.micro_step(batch, count_loss_tokens(batch)).loss

    return Side(adapted.model, step, updater(stepper.optimizer), batch, config)


def peft(folder: Path, device: torch.device, length: int, dtype: torch.dtype) -> Side:
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    config = LoraConfig(
        r=LORA_16["lora"]["rank"],
        lora_alpha=LORA_16["lora"]["alpha"],
        target_modules=ATTENTION,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return plain(get_peft_model(model, config), length)


def experts4bit(folder: Path, device: torch.device, length: int, dtype: torch.dtype) -> Side:
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
    return plain(model, length)


def plain(model: Any, length: int) -> Side:
    """A peer's model with the loss and the optimizer of this project, so that the rest is what differs."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def batch(tokens: int) -> Batch:
        ids = random_ids(model, tokens, length)
        return {"input_ids": ids, "labels": ids.clone()}

    def step(batch: Batch) -> Tensor:
        loss = token_loss(model, batch) / count_loss_tokens(batch)
        loss.backward()
        return loss.detach()

    return Side(model, step, updater(optimizer_maker(OptimizerConfig(name="adamw8bit"))(trained)), batch)


def random_ids(model: Any, tokens: int, length: int) -> Tensor:
    """So many tokens in rows of at most `length`, the same for all sides."""
    rows = max(1, tokens // length)
    return torch.randint(model.config.vocab_size, (rows, tokens // rows), generator=torch.Generator().manual_seed(0))


def updater(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


SIDES = {"peft": peft, "experts4bit": experts4bit}


# --- One case, in a process of its own ------------------------------------------------------------------------


def write_checkpoint(case: Case, folder: Path, small: bool) -> None:
    """So many layers with random weights, as the hub has them."""
    config = model_config(case, small)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if small else torch.bfloat16)
    model.save_pretrained(folder)


def model_config(case: Case, small: bool) -> PretrainedConfig:
    of_few = {"num_hidden_layers": case.layers}
    return AutoConfig.for_model(**(shrunk(case.model) | of_few if small else config_of(case.model, case.layers)))


def run_case(case: Case, folder: Path | None, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Its rows, one for each number of tokens; ends early where they have taken too long, loading aside."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length, small = min(LENGTH, options.tokens[-1]), options.small
    dtype = torch.float32 if small else torch.bfloat16
    try:
        if case.side == "moetune":
            side = moetune(case, case.model if folder is None else str(folder), device, length, dtype)
        else:
            assert folder is not None
            side = SIDES[case.side](folder, device, length, dtype)
    except torch.OutOfMemoryError as error:
        yield {**asdict(case), "out_of_memory": f"while it is loaded: {first_of(error)}"}
        return
    began, ceiling = time.perf_counter(), large_product(device, dtype)
    for count in options.tokens:
        row: dict[str, Any] = {**asdict(case), "tokens": count, "trained": side.trained, "ceiling": ceiling}
        if time.perf_counter() - began > options.seconds:
            yield row | {"left_out": f"{options.seconds:.0f} s were over"}
            continue
        try:
            yield row | timed(side, count, device, options.repetitions) | counted(side, count, device)
        except torch.OutOfMemoryError as error:
            yield row | {"out_of_memory": first_of(error)}
            side.model.zero_grad()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def first_of(error: Exception) -> str:
    return str(error).split(". ")[0]


def timed(side: Side, tokens: int, device: torch.device, repetitions: int) -> dict[str, Any]:
    """Seconds of steps after the first ones, the first one's loss, and the most that the allocator gave."""
    on_cuda = device.type == "cuda"
    batch = {name: v.to(device) if torch.is_tensor(v) else v for name, v in side.batch(tokens).items()}
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds, loss = [], None
    for number in range(WARM_UP + repetitions):
        began = time.perf_counter()
        loss_of_step = side.step(batch)
        side.update()
        if on_cuda:
            torch.cuda.synchronize(device)
        loss = float(loss_of_step) if number == 0 else loss
        seconds.append(time.perf_counter() - began)
    taken = median(seconds[WARM_UP:])
    peaks = {"allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}
    return {"seconds": taken, "all": seconds, "tokens_per_second": tokens / taken, "loss": loss} | (
        peaks if on_cuda else {}
    )


def large_product(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square product in `dtype`: of size 8192 on a GPU, 1024 on a CPU."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(device, lambda: torch.mm(a, b))


def counted(side: Side, tokens: int, device: torch.device) -> dict[str, Any]:
    """Operations of a step of ours, by a trace; a peer's are not known."""
    if side.config is None or device.type != "cuda":
        return {}
    work = trace(resolve(side.config(tokens), "cuda"), gpu=find_gpu(catalog_name(device))).work.values()
    return {"flops": sum(part.flops + part.flops32 for part in work)}


# --- All cases ------------------------------------------------------------------------------------------------


def in_own_process(case: Case, folder: Path | None, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a case, as they are measured; one that says why where there are none."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--repetitions", str(options.repetitions)]
    command += ["--seconds", str(options.seconds), "--tokens", *map(str, options.tokens)]
    command += [] if folder is None else ["--folder", str(folder)]
    command += ["--small"] * options.small
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith('{"model"'))
        if process.wait() == 0:
            return
        errors.seek(0)
        said = (errors.read().strip().splitlines() or [""])[-1]
    is_missing = "ModuleNotFoundError" in said
    yield asdict(case) | {"failed": f"not installed ({said})" if is_missing else said or "no answer"}


def run(names: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of all cases. Sides that train the same layers read one checkpoint; one that trains more or fewer numbers
    than the first has failed."""
    for name in names:
        with tempfile.TemporaryDirectory() as parent:
            trained: dict[tuple[str, int | None], int] = {}
            for case in PARTS[name]:
                if options.models and case.model not in options.models:
                    continue
                folder = None if case.layers is None else Path(parent) / case.model
                if folder is not None and not folder.is_dir():
                    write_checkpoint(case, folder, options.small)
                for row in in_own_process(case, folder, options):
                    if folder is not None and "trained" in row:
                        first = trained.setdefault((case.model, case.layers), row["trained"])
                        if row["trained"] != first:
                            row = row | {"failed": f"trains {row['trained']:,} numbers, the side before {first:,}"}
                    yield row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown. `×` is our tokens/s over the side's, on the same checkpoint."""
    ours = {(r["model"], r["layers"], r["tokens"]): r for r in rows if r["side"] == "moetune" and "seconds" in r}
    lines = ["| model | layers | way | side | tokens a step | tokens/s | share | peak | loss | moetune is |"]
    lines.append("|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [row["model"], row["layers"] or "all", row["way"], row["side"], row.get("tokens", "")]
        if "failed" in row or "seconds" not in row:
            said = row.get("failed") or row.get("left_out") or "out of memory"
            lines.append(f"| {' | '.join(map(str, cells))} | {said} |||||")
            continue
        share = f"{row['flops'] / row['seconds'] / row['ceiling']:.0%}" if "flops" in row else "–"
        peak = f"{row['allocated'] / GiB:.1f} GiB" if "allocated" in row else "–"
        our = None if row["side"] == "moetune" else ours.get((row["model"], row["layers"], row["tokens"]))
        times = "" if our is None else f"{our['tokens_per_second'] / row['tokens_per_second']:.2f}×"
        cells += [f"{row['tokens_per_second']:,.0f}", share, peak, f"{row['loss']:.3f}", times]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="mixtral,fine,peers", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="of the parts; by default all")
    parser.add_argument("--small", action="store_true", help="shrunk models in float32, all sides, on any machine")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step; by default 1k to 32k")
    parser.add_argument("--repetitions", type=int, default=3, help="timed steps of each")
    parser.add_argument("--seconds", type=float, default=150, help="after which a case begins no larger step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.names = ["small"] if options.small else options.parts.split(",")
    options.tokens = sorted(options.tokens or ((128, 256) if options.small else TOKENS))
    if unknown := [name for name in options.names if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.small and options.case is None and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --small runs without one")
    return options


def main() -> None:
    options = parse()
    if options.case is not None:
        with answering():
            for row in run_case(Case(**options.case), options.folder, options):
                print(json.dumps(row), flush=True)
        return
    on_cuda = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []
    report = {
        "schema": 1,
        "benchmark": "throughput",
        "versions": versions("moetune", "torch", "transformers", "peft", "bitsandbytes", *E4B),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "null_device": nullcuda.is_present(),
        "commit": commit(),
        "cases": rows,
    }
    for row in run(options.names, options):
        rows.append(row)
        print(table(rows).splitlines()[-1] if len(rows) > 1 else table(rows), flush=True)
        if options.json is not None:  # after each row: a lent machine may be taken away
            write_json(report, options.json)
    if any("failed" in row and "not installed" not in row["failed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
