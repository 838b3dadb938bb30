"""Would training survive 8-bit products? Frozen weights' products with rounded operands, on tiny-mixtral.

    python scripts/bench/compute_8bit.py --json docs/benchmarks/compute_8bit.json

LoRA of rank 16 on attention and all experts, on an NF4 base. What a card would round is rounded before each product
with a frozen weight of attention and experts, forward and for the gradient of its input: both operands to bfloat16, and
then to 8 bits with one scale for each row that is summed over, of tokens as of weights, in float8_e4m3 or int8. Sums
are in float32, results are rounded to bfloat16; LoRA's own products, routers and the head are as always. Held-out loss
of 40 documents of Unicode names, which the model has not learned.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _common import commit, cpu_name, versions, write_json
from choosing_experts import QUIET, held_out_file
from torch import Tensor

from moetune.adapt.layers import low_rank
from moetune.config.schema import RunConfig
from moetune.kernels.grouped import GroupedGemm
from moetune.run.folder_files import read_metrics
from moetune.run.resolve import resolve
from moetune.watch import memory_record
from moetune.watch.train import train

Round = Callable[[Tensor, int], Tensor]


def to_fp32(values: Tensor, dim: int) -> Tensor:
    return values


def to_bf16(values: Tensor, dim: int) -> Tensor:
    return values.bfloat16().float()


def to_fp8(values: Tensor, dim: int) -> Tensor:
    values, scale = to_bf16(values, dim), values.abs().amax(dim, keepdim=True).clamp(min=1e-30) / 448
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def to_int8(values: Tensor, dim: int) -> Tensor:
    values, scale = to_bf16(values, dim), values.abs().amax(dim, keepdim=True).clamp(min=1e-30) / 127
    return (values / scale).round().clamp(-127, 127) * scale


ROUNDED: dict[str, Round] = {"bf16": to_bf16, "fp8": to_fp8, "int8": to_int8, "fp32": to_fp32}
"""Name -> how operands are rounded. float32 operands show by how much two harmless roundings differ."""


@contextmanager
def computing(compute: Round) -> Iterator[None]:
    """Round the operands and the results of frozen weights' products."""
    mm, dequantized = GroupedGemm.mm, low_rank.dequantized

    def grouped(gemm: GroupedGemm, a_Np: Tensor, b_Cpq: Tensor) -> Tensor:
        return to_bf16(mm(gemm, compute(a_Np, -1), compute(b_Cpq, -2)), -1)

    def linear(gemm: GroupedGemm, x_Np: Tensor, weights_Cqp: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        return grouped(gemm, x_Np, weights_Cqp.mT)

    class Frozen(Tensor):
        """A dequantized weight [q, p] of a linear layer, in `x @ W` and in `linear(x, W, None)`."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.nn.functional.linear, Tensor.matmul, Tensor.__matmul__):
                x, weight = args[0], args[1].as_subclass(Tensor)
                weight = weight.mT if func is torch.nn.functional.linear else weight
                return to_bf16(compute(x, -1) @ compute(weight, -2), -1)
            return super().__torch_function__(func, types, args, kwargs or {})

    with ExitStack() as stack:
        stack.enter_context(patch.object(GroupedGemm, "mm", grouped))
        stack.enter_context(patch.object(GroupedGemm, "linear", linear))
        stack.enter_context(patch.object(low_rank, "FEW_ROWS", 0))
        of_linear = lambda base, dtype: dequantized(base, dtype).as_subclass(Frozen)  # noqa: E731
        stack.enter_context(patch.object(low_rank, "dequantized", of_linear))
        # which takes longer than the training
        stack.enter_context(patch.object(memory_record, "predicted", lambda *_: memory_record.Predicted()))
        yield


def trained(compute: str, seed: int, steps: int, folder: Path, held_out: Path) -> dict[str, Any]:
    config = RunConfig.model_validate(
        {
            "model": {"path": "tiny-mixtral", "base": "nf4", "dtype": "fp32"},
            "adapt": {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}},
            "optimizer": {"name": "adamw", "lr": 3.0e-3},
            "train": {
                "micro_batch": 4, "accumulate": 1, "sequence_length": 256, "steps": steps, "seed": seed,
                "eval_every": steps, "save_every": steps,
            },
            "data": {"train": "unicode-names", "eval": str(held_out)},
            "output": str(folder / "run"),
        }
    )  # fmt: skip
    with computing(ROUNDED[compute]):
        result = train(resolve(config, "cpu"), overwrite=True, device="cpu", console=QUIET)
    losses = [line["loss"] for line in read_metrics(folder / "run/metrics.jsonl") if "loss" in line]
    return {
        "compute": compute,
        "seed": seed,
        "before": result.eval_loss_before,
        "after": result.eval_loss_after,
        "last_20_steps": sum(losses[-20:]) / len(losses[-20:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report: dict[str, Any] = {"schema": 1, "commit": commit(), "device": cpu_name()}
    report |= {"versions": versions("torch", "moetune"), "steps": given.steps, "runs": []}
    if given.json.exists():  # what was begun with the same steps goes on
        begun = json.loads(given.json.read_text(encoding="utf-8"))
        report = begun if begun["steps"] == given.steps else report
    runs = report["runs"]
    with tempfile.TemporaryDirectory() as folder:
        held_out = held_out_file(Path(folder))
        for seed, compute in product(range(given.seeds), ROUNDED):
            if not any((run["seed"], run["compute"]) == (seed, compute) for run in runs):
                runs.append(trained(compute, seed, given.steps, Path(folder), held_out))
                write_json(report, given.json)
    for run in runs:
        exact = next(one for one in runs if (one["seed"], one["compute"]) == (run["seed"], "bf16"))
        off = (f"{run[key] / exact[key] - 1:+.2%}" for key in ("before", "after", "last_20_steps"))
        print(f"| {run['compute']} | {run['seed']} | {run['after']:.3f} | {' | '.join(off)} |")


if __name__ == "__main__":
    main()
