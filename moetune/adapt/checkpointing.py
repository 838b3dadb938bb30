"""Activation checkpointing that keeps each layer's routing decisions.

A checkpointed layer runs its forward again during backward. Were the router to choose again, a tie or a
nondeterministic kernel could send a token elsewhere than the first time: the gradient would be that of another
function, or a shape would not match. So the chosen indices are kept (T·K integers a layer) and everything else is
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from moetune.errors import UserError

aten = torch.ops.aten


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Checkpoints every decoder layer: what is kept of one is its input and its router's choices.

    Raises:
        UserError: transformers offers no checkpointing for this architecture.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"train.checkpointing: {type(model).__name__} does not support activation checkpointing; "
            "set train.checkpointing=none"
        )
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": routing_contexts})


def routing_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for the forward and the recomputation of one checkpointed call."""
    kept: list[Tensor] = []
    return _Record(kept), _Replay(kept)


class _Record(TorchDispatchMode):
    """Keeps the indices of every choice: `topk`, and `max` along a dimension, are how routers choose."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _REPLAY:
            self.kept.append(out[1])
        return out


class _Replay(TorchDispatchMode):
    """Answers every choice with the kept indices, and the values that stand there now."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def __enter__(self) -> _Replay:
        self.left = iter(self.kept)  # anew each time: a graph that is kept is recomputed at every backward
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REPLAY:
            return _REPLAY[func](next(self.left), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _replay_topk(
    indices: Tensor, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    return input.gather(dim, indices), indices


def _replay_max(indices: Tensor, input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if keepdim:
        return input.gather(dim, indices), indices
    return input.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices


_REPLAY: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    aten.topk.default: _replay_topk,
    aten.max.dim: _replay_max,
}
