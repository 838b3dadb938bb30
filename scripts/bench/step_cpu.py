"""One training step on a CPU: LoRA on all experts, moetune beside stock PEFT `target_parameters`.

Three models: few large experts, as Mixtral's, many small ones, as Qwen3-30B-A3B's, and some in between.

    python scripts/bench/step_cpu.py --json docs/benchmarks/step_cpu.json

Both sides load one random float32 Mixtral, hold equal factors, and take the same steps: forward, backward, fused
AdamW. Before anything is timed, their losses and every factor's gradient are compared; a difference ends the script.

**Time.** Repetitions alternate (moetune, PEFT, moetune, ...) in one process, after a warm-up of both, so a slow moment
of the machine meets both. A ratio is PEFT / moetune of one such pair: above 1, moetune is faster. One thread by
default: where other jobs run too, threads that wait for each other measure the scheduler. CPU time is what the process
worked: other jobs on the cores change it less.

**Memory.** Storages of tensors, counted when an operation returns one and until it is freed. `before` is what is alive
when a step begins (weights, factors, optimizer states, batch), `peak` the most alive at once during the step, optimizer
included, and `above` their difference. What an operation allocates and frees inside itself is not seen. A ratio is
moetune / PEFT: below 1, moetune needs less.

Shapes: E experts, r rank, in and out features of a projection.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from _common import MiB, commit, cpu_name, mixtral_config, versions, write_json, write_table
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from moetune.adapt.build import build
from moetune.config.schema import OptimizerConfig, RunConfig
from moetune.experts.bank import ExpertBank
from moetune.run.resolve import resolve
from moetune.training.optim.optimizers import make_optimizer, optimizer_maker
from moetune.training.step.batch import Batch
from moetune.training.step.micro_step import count_loss_tokens, micro_step, token_loss
from moetune.training.step.router_losses import RouterWatch

Checkpointing = Literal["none", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "full")
SIDES = ("moetune", "peft")
TOLERANCE = 1e-5  # relative: of the loss, and of each gradient in Frobenius norm; float32 sums in another order


@dataclass(frozen=True)
class Sizes:
    """The model, the factors and the batch. By default `intermediate` is 3.5 × hidden, as in Mixtral-8x7B. Vocabularies
    are small, so that the experts and not the head are what is measured."""

    hidden: int = 512
    intermediate: int = 1792
    layers: int = 4
    experts: int = 8
    top_k: int = 2
    heads: int = 8
    kv_heads: int = 2
    vocabulary: int = 1000
    rank: int = 16
    tokens: int = 512


SHAPES = {
    "8 experts": Sizes(),
    "64 experts": Sizes(hidden=384, intermediate=192, experts=64, top_k=8),
    "128 experts": Sizes(hidden=256, intermediate=96, experts=128, top_k=8),
}


@dataclass(frozen=True)
class Side:
    """One way to train. `step` leaves gradients and returns the loss; `gradients` gives those of the factors in
    moetune's shapes, A [E, r, in] and B [E, out, r], by (layer, name)."""

    step: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    module: nn.Module
    gradients: Callable[[], dict[tuple[int, str], Tensor]]

    def train_step(self) -> Tensor:
        loss = self.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


# --- The two sides ------------------------------------------------------------------------------------------


def save_model(sizes: Sizes, folder: Path) -> None:
    """Draws the model that both sides load."""
    torch.manual_seed(0)
    config = mixtral_config(sizes, num_experts_per_tok=sizes.top_k)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_batch(sizes: Sizes) -> Batch:
    ids = torch.randint(sizes.vocabulary, (1, sizes.tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def moetune_side(folder: Path, sizes: Sizes, batch: Batch, checkpointing: Checkpointing) -> Side:
    """A run file's way: the real `build`, the real `micro_step`."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "base": "fp32", "dtype": "fp32"},
            "adapt": {"lora": {"rank": sizes.rank, "alpha": 2 * sizes.rank, "targets": ["experts"]}},
            "optimizer": {"name": "adamw"},
            "train": {"checkpointing": checkpointing, "sequence_length": sizes.tokens},
        }
    )
    adapted = build(resolve(config, "cpu"), "cpu")
    adapted.model.train()
    watch, tokens = RouterWatch(adapted), count_loss_tokens(batch)
    optimizer = make_optimizer(adapted)
    banks = [module for module in adapted.model.modules() if isinstance(module, ExpertBank)]
    # B starts at zero, and then A has no gradient to compare.
    torch.manual_seed(2)
    for bank in banks:
        for name, factor in bank.lora.named_parameters():
            if name.endswith("_B"):
                nn.init.normal_(factor, std=0.02)
    factors = {
        (layer, name): factor for layer, bank in enumerate(banks) for name, factor in bank.lora.named_parameters()
    }
    return Side(
        step=lambda: micro_step(adapted.model, batch, tokens, watch, config.train).loss,
        optimizer=optimizer,
        module=adapted.model,
        gradients=lambda: {key: factor.grad.squeeze(1) for key, factor in factors.items()},
    )


def peft_side(folder: Path, sizes: Sizes, batch: Batch, checkpointing: Checkpointing) -> Side:
    """PEFT as its documentation has it, on the model as transformers loads it; our loss, so only experts differ."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    config = LoraConfig(
        r=sizes.rank,
        lora_alpha=2 * sizes.rank,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no module, only parameters, are targeted
        model = get_peft_model(model, config)
    model.train()
    tokens = count_loss_tokens(batch)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> Tensor:
        loss = token_loss(model, batch) / tokens
        loss.backward()
        return loss.detach()

    return Side(
        step=step,
        optimizer=optimizer_maker(OptimizerConfig(name="adamw"))(trained),
        module=model,
        gradients=lambda: {key: view(factor.grad) for key, (factor, view) in peft_factors(model, sizes).items()},
    )


def peft_factors(
    model: nn.Module, sizes: Sizes
) -> dict[tuple[int, str], tuple[nn.Parameter, Callable[[Tensor], Tensor]]]:
    """PEFT's factors under moetune's names, each with a view of it in moetune's shape.

    PEFT stores A as [E·r, in], experts outermost, and B as [out, r·E], experts innermost.
    """
    factors: dict[tuple[int, str], tuple[nn.Parameter, Callable[[Tensor], Tensor]]] = {}
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    seen: dict[str, int] = {}
    for wrapper in wrappers:
        layer = seen.setdefault(wrapper.parameter_name, 0)
        seen[wrapper.parameter_name] += 1
        name = wrapper.parameter_name.removesuffix("_proj")
        A, B = (lora["default"].weight for lora in (wrapper.lora_A, wrapper.lora_B))
        factors[layer, f"{name}_A"] = A, lambda A: A.view(sizes.experts, sizes.rank, -1)
        factors[layer, f"{name}_B"] = B, lambda B: B.view(-1, sizes.rank, sizes.experts).permute(2, 0, 1)
    return factors


@torch.no_grad()
def copy_factors(moetune: Side, peft: Side, sizes: Sizes) -> None:
    """Gives PEFT the factors of moetune."""
    banks = [module for module in moetune.module.modules() if isinstance(module, ExpertBank)]
    for (layer, name), (factor, view) in peft_factors(peft.module, sizes).items():
        view(factor).copy_(getattr(banks[layer].lora, name).squeeze(1))


# --- What is measured ---------------------------------------------------------------------------------------


def compare(moetune: Side, peft: Side) -> dict[str, float]:
    """Relative errors of the loss and of the worst gradient.

    Raises:
        SystemExit: one exceeds `TOLERANCE`; a time would compare two different things.
    """
    ours, theirs = moetune.step(), peft.step()
    errors = {"loss": abs(ours / theirs - 1).item(), "worst_gradient": 0.0}
    expected, found = peft.gradients(), moetune.gradients()
    assert found, "nothing trains"
    assert found.keys() == expected.keys(), "the two sides do not train the same factors"
    for key, gradient in expected.items():
        assert gradient.norm() > 0, f"the gradient of {key} is zero and shows nothing"
        error = ((found[key] - gradient).norm() / gradient.norm()).item()
        errors["worst_gradient"] = max(errors["worst_gradient"], error)
    for side in (moetune, peft):
        side.optimizer.zero_grad()
    if max(errors.values()) > TOLERANCE:
        raise SystemExit(f"the two sides disagree beyond {TOLERANCE}: {errors}")
    return {**errors, "tolerance": TOLERANCE, "loss_value": theirs.item()}


def time_steps(
    sides: dict[str, Side], repetitions: int, warm_up: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each step of each side, in turn; and those of them that a core worked for it."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    worked: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(warm_up + repetitions):
        for name, side in sides.items():
            start, start_worked = time.perf_counter(), time.process_time()
            side.train_step()
            if repetition >= warm_up:
                seconds[name].append(time.perf_counter() - start)
                worked[name].append(time.process_time() - start_worked)
    return seconds, worked


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that are alive: those given, and those of every tensor that an operation returns."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.current = self.peak = 0
        for tensor in known:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._alive:
            return
        size = storage.nbytes()
        gone = partial(self._remove, id(storage), size)
        self._alive[id(storage)] = weakref.ref(storage, gone)
        self.current += size
        self.peak = max(self.peak, self.current)

    def _remove(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.current -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out


def step_memory(side: Side, batch: Batch) -> dict[str, int]:
    """Bytes before, at the peak of, and above during one step whose optimizer states exist already."""
    with LiveStorages(tensors_of(side, batch)) as live:
        before = live.current
        side.train_step()
    return {"before": before, "peak": live.peak, "above": live.peak - before}


def tensors_of(side: Side, batch: Batch) -> Iterator[Tensor]:
    """What is alive between two steps."""
    yield from side.module.parameters()
    yield from side.module.buffers()
    yield from batch.values()
    for state in side.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


# --- The report ---------------------------------------------------------------------------------------------


def run(shapes: dict[str, Sizes], repetitions: int, warm_up: int = 3) -> dict[str, Any]:
    """Everything that the JSON holds."""
    results: dict[str, Any] = {}
    for shape, sizes in shapes.items():
        batch = make_batch(sizes)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_model(sizes, folder)
            of_shape = {
                checkpointing: measure(folder, sizes, batch, checkpointing, repetitions, warm_up)
                for checkpointing in CHECKPOINTING
            }
        results[shape] = {"sizes": asdict(sizes), "checkpointing": of_shape}
    return {
        "schema": 2,
        "benchmark": "step_cpu",
        "versions": versions("moetune", "torch", "transformers", "peft"),
        "device": {"name": cpu_name(), "threads": torch.get_num_threads()},
        "commit": commit(),
        "repetitions": repetitions,
        "shapes": results,
    }


def measure(
    folder: Path, sizes: Sizes, batch: Batch, checkpointing: Checkpointing, repetitions: int, warm_up: int
) -> dict[str, Any]:
    moetune = moetune_side(folder, sizes, batch, checkpointing)
    peft = peft_side(folder, sizes, batch, checkpointing)
    copy_factors(moetune, peft, sizes)
    agreement = compare(moetune, peft)
    sides = dict(zip(SIDES, (moetune, peft), strict=True))
    seconds, worked = time_steps(sides, repetitions, warm_up)
    pairs, of_cpu = (
        [theirs / ours for ours, theirs in zip(*times.values(), strict=True)] for times in (seconds, worked)
    )
    memory = {name: step_memory(side, batch) for name, side in sides.items()}
    return {
        "agreement": agreement,
        "parameters": {
            "total": sum(p.numel() for p in peft.module.parameters()),
            "trained": sum(p.numel() for p in peft.module.parameters() if p.requires_grad),
        },
        "seconds": {name: {"median": median(times), "all": times} for name, times in seconds.items()},
        "bytes": memory,
        "ratios": {
            "speed": {"median": median(pairs), "min": min(pairs), "max": max(pairs)},
            "cpu_time": {"median": median(of_cpu), "min": min(of_cpu), "max": max(of_cpu)},
            "peak": memory["moetune"]["peak"] / memory["peft"]["peak"],
            "above": memory["moetune"]["above"] / memory["peft"]["above"],
        },
    }


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield "| model | checkpointing | moetune | PEFT | as fast | in CPU time | above: moetune | PEFT | ratio of peaks |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for shape, of_shape in report["shapes"].items():
        for checkpointing, result in of_shape["checkpointing"].items():
            seconds = [f"{result['seconds'][side]['median']:.3f} s" for side in SIDES]
            above = [f"{result['bytes'][side]['above'] / MiB:.1f} MiB" for side in SIDES]
            ratios = result["ratios"]
            speed = "{median:.2f}× ({min:.2f} to {max:.2f})".format(**ratios["speed"])
            of_cpu = f"{ratios['cpu_time']['median']:.2f}×"
            cells = (shape, checkpointing, *seconds, speed, of_cpu, *above, f"{ratios['peak']:.2f}×")
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here, and the page beside it")
    parser.add_argument("--repetitions", type=int, default=15, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=1, help="threads of one operation")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES], help="which models; by default all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = run({shape: SHAPES[shape] for shape in options.shapes}, options.repetitions)
    print("\n".join(table(report)))
    if options.json is not None:
        write_json(report, options.json)
        write_table(table(report), options.json.with_suffix(".md"))


if __name__ == "__main__":
    main()
