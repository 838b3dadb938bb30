"""Trainers of TRL on the null device: the most that their steps allocate."""

from __future__ import annotations

import gc
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetune.adapt.build import build
from moetune.compat.trl import Answers, make_trainer
from moetune.memory.assumed_routing import BALANCED
from moetune.run.resolve import ResolvedRun
from moetune.training.trl import trl_arguments, trl_model

aten = torch.ops.aten


class NullAnswers(Answers):
    """The null device computes no values either."""

    def lacks_values(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.index_put, aten.index_put_, aten._index_put_impl_):
            return args[0]  # the gradient of what a mask selected
        if func is aten._to_copy.default and args[0].is_cuda and "cpu" in str((kwargs or {}).get("device")):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Enough(Exception):
    """All tokens were generated, which the values of no tensor say here."""


def measured(run: ResolvedRun, kind: Any, more: dict[str, Any], folder: Path) -> int:
    """Train two steps; return the most bytes that were allocated."""
    card = torch.device("cuda", 0)
    gc.collect()
    before = torch.cuda.memory_allocated(card)
    adapted = build(run, card)
    torch.cuda.reset_peak_memory_stats(card)  # of a large model, loading takes more than a step
    steps = 1 + more.get("num_iterations", 1)  # GRPO generates anew in the last
    arguments = trl_arguments(run, kind) | more | {"max_steps": steps, "output_dir": str(folder), "disable_tqdm": True}
    length, generate, left = arguments.get("max_completion_length", 0), adapted.model.generate, 0
    answers = NullAnswers(length or None)

    def count(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        nonlocal left
        left -= 1
        if not left:
            raise Enough
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def generating(input_ids: Tensor, **given: Any) -> Tensor:
        nonlocal left
        left = length
        with suppress(Enough):
            generate(input_ids=input_ids, **given, stopping_criteria=[count])
        return input_ids.new_ones((len(input_ids), input_ids.shape[1] + length))

    adapted.model.generate = generating  # type: ignore[method-assign]
    with adapted.expert_context.hooks.using(count_rows=BALANCED.count_rows):
        prompt = run.config.train.sequence_length - length if length else 1
        trainer = make_trainer(kind, trl_model(adapted), arguments, 8 * run.config.train.micro_batch, prompt)
        # ORPO has no masks; and under a dispatch mode autograd would not add gradients of logits in place.
        with nullcontext() if kind == "orpo" else answers:
            trainer.train()
    found = torch.cuda.max_memory_allocated(card) - before
    return found
