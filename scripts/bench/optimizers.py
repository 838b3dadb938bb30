"""Every optimizer, fused into backward or not: memory and time of the real step, side by side.

    python scripts/bench/optimizers.py --json docs/benchmarks/optimizers.json
    python scripts/bench/optimizers.py --device cuda --json docs/benchmarks/optimizers_cuda.json

A small Mixtral with random weights trains two experts of every layer and all routers on random tokens. On a CPU it is
float32, where master weights make no difference; on CUDA it is larger and bfloat16, and every way of master weights
is taken too. `norm` rows set `train.max_grad_norm`, so that a fused step makes a first pass which only measures.

**Memory.** One optimizer at a time is on the device. `gradients` is the most bytes of gradients alive at once, by the
tracker that the trace uses. `steady` is what stays between steps, `peak` the most in two steps, `above` their
difference: on a CPU by the tracker, on CUDA by torch's counters, which do not see states that are paged. `states` are
the optimizer's own tensors and `masters` its float32 copies.

**Time.** Steps alternate with those of plain AdamW (adamw, not fused, no masters) in one process. A ratio is that of
two neighbours, `time` the median of them: below 1 is faster than AdamW. Before, losses are compared: the first step of
all begins with the same weights and tokens.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from _common import MiB, commit, cpu_name, mixtral_config, versions, write_json, write_table

from moetune.adapt.build import build
from moetune.config.schema import OptimizerName, RunConfig
from moetune.memory.trace import Steps, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.run.resolve import resolve
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.step.batch import Batch
from moetune.training.step.micro_step import count_loss_tokens
from moetune.training.step.stepper import Stepper

MASTERS = ("none", "fp32", "stochastic")
BYTES = ("gradients", "states", "masters", "steady", "peak", "above")
TOLERANCE = 1e-5  # relative, of the first loss: the forward pass is the same


@dataclass(frozen=True)
class Sizes:
    """The model and the batch; `intermediate` is 3.5 × hidden, as in Mixtral-8x7B."""

    hidden: int = 512
    intermediate: int = 1792
    layers: int = 4
    experts: int = 8
    heads: int = 8
    kv_heads: int = 2
    vocabulary: int = 1000
    tokens: int = 256


SIZES = {"cpu": Sizes(), "cuda": Sizes(hidden=2048, intermediate=7168, heads=16, kv_heads=4, tokens=2048)}


@dataclass(frozen=True)
class Variant:
    """One way to update."""

    optimizer: str
    fused: bool = False
    masters: str = "none"
    norm: bool = False

    def __str__(self) -> str:
        words = [self.optimizer, "fused" * self.fused, "norm" * self.norm]
        return " ".join(filter(None, words)) + (f" {self.masters}" if self.masters != "none" else "")


BASELINE = Variant("adamw")


def variants(device: str) -> Iterator[Variant]:
    """Plain AdamW first."""
    for masters in MASTERS if device == "cuda" else MASTERS[:1]:
        for name in get_args(OptimizerName):
            yield from (Variant(name, fused, masters) for fused in (False, True))
    yield from (Variant(name, fused=True, norm=True) for name in ("adamw", "lomo"))


def run_config(variant: Variant, sizes: Sizes, folder: Path, device: str) -> RunConfig:
    dtype = "bf16" if device == "cuda" else "fp32"
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "weights": "random", "base": dtype, "dtype": dtype},
            "adapt": {"router": "all", "experts": {"ids": [0, 1]}},
            "optimizer": {
                "name": variant.optimizer,
                "fused_backward": variant.fused,
                "master_weights": variant.masters,
            },
            "train": {"sequence_length": sizes.tokens, "accumulate": 1, "max_grad_norm": 1.0 if variant.norm else 0.0},
        }
    )


class Model:
    """A variant's model and one batch."""

    def __init__(self, variant: Variant, sizes: Sizes, folder: Path, device: str) -> None:
        config = run_config(variant, sizes, folder, device)
        self.adapted = build(resolve(config, torch.device(device).type), device)  # from the run file's seed
        self.adapted.model.train()
        torch.manual_seed(1)
        made = batches_of(self.adapted)(1)
        self.batch: Batch = {name: tensor.to(device) for name, tensor in made.items()}

    def steps(self) -> Steps:
        """Its steps under a tracker."""
        return Steps(self.adapted, lambda rows: {name: tensor.clone() for name, tensor in self.batch.items()})


class Run:
    """A variant's model and its steps."""

    def __init__(self, variant: Variant, sizes: Sizes, folder: Path, device: str) -> None:
        model = Model(variant, sizes, folder, device)
        self.model, self.batch, self.device = model.adapted.model, model.batch, device
        self.tokens = count_loss_tokens(self.batch)
        self.stepper = Stepper(model.adapted, make_optimizer(model.adapted))

    def step(self) -> float:
        """What the trainer does; returns the loss before the update."""
        loss = self.stepper.micro_step(self.batch, self.tokens).loss
        self.stepper.finish()
        return loss.item()

    def end(self) -> None:
        """Gives the memory back."""
        del self.stepper, self.model
        gc.collect()

    def timed(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


# --- What is measured -------------------------------------------------------------------------------------------------


def memory_of(variant: Variant, sizes: Sizes, folder: Path, device: str) -> dict[str, int]:
    """The bytes of a variant's first two steps, alone on the device."""
    on_cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if on_cuda else 0
    steps = Model(variant, sizes, folder, device).steps()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    traced = steps.run(Tracker(steps.named), 1)
    if on_cuda:
        steady, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    else:
        steady, peak = traced.parts(traced.end).total, traced.parts().total
    found = {
        "gradients": traced.most("gradients"),
        "states": storage_bytes(steps.optimizer.states()),
        "masters": storage_bytes(steps.optimizer.masters()),
        "steady": steady,
        "peak": peak,
        "above": peak - steady,
    }
    del traced, steps
    gc.collect()
    return found


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Bytes of their storages, those that are shared once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def time_of(variant: Variant, baseline: Run, sizes: Sizes, folder: Path, repetitions: int) -> dict[str, Any]:
    """Seconds of alternating steps of the baseline and of a variant, and the ratios of neighbours."""
    run = Run(variant, sizes, folder, baseline.device)
    first = run.step()
    run.step()
    baseline.step()
    pairs = [(baseline.timed(), run.timed()) for _ in range(repetitions)]
    ratios = [own / other for other, own in pairs]
    run.end()
    return {
        "first_loss": first,
        "seconds": {"adamw": [other for other, _ in pairs], "own": [own for _, own in pairs]},
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def run(device: str, sizes: Sizes, repetitions: int) -> dict[str, Any]:
    """Everything that the JSON holds.

    Raises:
        SystemExit: variants did not begin with the same loss; they would not have taken the same steps.
    """
    rows = []
    gc.freeze()  # what libraries made need not be looked through every time
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mixtral_config(sizes).save_pretrained(folder)
        memory = {variant: memory_of(variant, sizes, folder, device) for variant in variants(device)}
        baseline = Run(BASELINE, sizes, folder, device)
        first = baseline.step()
        for variant, bytes_ in memory.items():
            timed = time_of(variant, baseline, sizes, folder, repetitions)
            if abs(timed["first_loss"] / first - 1) > TOLERANCE:
                raise SystemExit(f"{variant} begins with loss {timed['first_loss']}, and adamw with {first}")
            rows.append({"name": str(variant), **asdict(variant), "bytes": bytes_, **timed})
        weights = list(baseline.model.parameters())
    gc.unfreeze()
    card = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return {
        "schema": 1,
        "benchmark": "optimizers",
        "versions": versions("moetune", "torch", "transformers", "bitsandbytes"),
        "device": {"type": device, "name": card, "threads": torch.get_num_threads()},
        "commit": commit(),
        "sizes": asdict(sizes),
        "dtype": "bf16" if device == "cuda" else "fp32",
        "repetitions": repetitions,
        "parameters": {
            "trained": sum(p.numel() for p in weights if p.requires_grad),
            "trained_tensors": sum(p.requires_grad for p in weights),
        },
        "results": rows,
    }


# --- The report -------------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table; bytes in MiB."""
    yield f"| optimizer | {' | '.join(BYTES)} | time |"
    yield f"|---|{'---:|' * (len(BYTES) + 1)}"
    for row in report["results"]:
        memory = " | ".join(f"{row['bytes'][name] / MiB:.1f}" for name in BYTES)
        yield f"| {row['name']} | {memory} | {row['ratio']['median']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here, and the page beside it")
    parser.add_argument("--repetitions", type=int, default=7, help="timed steps of each, beside one of AdamW each")
    parser.add_argument("--threads", type=int, default=1, help="threads of one operation on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = run(options.device, SIZES[options.device], options.repetitions)
    print("\n".join(table(report)))
    if options.json is not None:
        write_json(report, options.json)
        write_table(table(report), options.json.with_suffix(".md"))


if __name__ == "__main__":
    main()
