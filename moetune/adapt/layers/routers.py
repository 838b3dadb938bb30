"""Softmax routers by two kernels, one forward and one backward.

transformers' code launches seven kernels from the logits to the weights, and thirteen for their gradient.
kernels/routing.py has the formulas. The backward pass keeps the logits in their dtype, and the ids.
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from moetune.compat.torch import apply_function
from moetune.compat.transformers import softmax_router
from moetune.kernels import routing as kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_routers(model: nn.Module) -> None:
    """Replace the forward method of every router whose code is Mixtral's or Qwen3-MoE's by the fused one, in place."""
    for module in model.modules():
        if softmax_router(module) is not None:
            module.__dict__ |= {"forward": partial(_forward, module), "choices": None}


class Choices(Protocol):
    """Record of the ids that routers chose, in `kept`; in the recomputation (`again`) `next` returns the next one."""

    again: bool
    kept: list[Any]

    def next(self) -> Any: ...


def records_choices(router: Any) -> bool:
    """Return whether a router's forward is the fused one, and records and replays its choices itself.

    Its attribute `choices` may be a function that returns the `Choices` of the checkpointed call that runs, or None.
    """
    return hasattr(router, "choices") and not isinstance(router.weight, DTensor) and router.weight.dtype in _DTYPES


def _forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not records_choices(router):
        return type(router).forward(router, hidden)
    kind = softmax_router(router)  # as its attributes are now
    assert kind is not None
    logits = nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    dtype = torch.float32 if kind.keeps_float32 else logits.dtype
    choices = None if router.choices is None else router.choices()
    weights, ids = apply_function(_Choose, logits, kind.top_k, kind.normalized, dtype, choices)
    return logits, weights, ids


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, top_k: int, normalized: bool, dtype: torch.dtype, choices: Choices | None
    ) -> tuple[Tensor, Tensor]:
        if choices is not None and choices.again:
            ids = choices.next()
            weights = kernels.weigh(logits, ids, normalized, dtype)
        else:
            weights, ids = kernels.choose(logits, top_k, normalized, dtype)
            if choices is not None:
                choices.kept.append(ids)
        ctx.normalized = normalized
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)  # else torch would make zeros, as the gradient of the ids
        return weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
        logits, ids = ctx.saved_tensors
        return kernels.weigh_backward(dweights, logits, ids, ctx.normalized), None, None, None, None
