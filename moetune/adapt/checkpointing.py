"""Activation checkpointing that keeps each layer's routing decisions.

A checkpointed layer runs its forward again during backward. Were the router to choose again, a tie or a
nondeterministic kernel could send a token elsewhere than the first time: the gradient would be that of another
function, or a shape would not match. So the chosen indices are kept (T·K integers a layer) and everything else is
recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PreTrainedModel

from moetune.experts.host import AsyncCopy, CopyStream
from moetune.patches.transformers import checkpoint_layers_by

aten = torch.ops.aten


def enable_checkpointing(model: PreTrainedModel, offload_to: torch.device | None = None) -> None:
    """Checkpoints every decoder layer: what is kept of one is its input and its router's choices.

    Args:
        offload_to: the device of a model whose layers' inputs shall wait on the host for backward.
    """
    keep_choices(model, offload_to)
    model.activation_checkpointing_enable()


def keep_choices(model: PreTrainedModel, offload_to: torch.device | None = None) -> None:
    """Whoever switches checkpointing on from now, gets the kind that keeps choices: trainers do so by their own
    settings, and TRL's switches it off and on around a reference model."""
    switch = model._set_gradient_checkpointing
    keeping = partial(checkpoint, use_reentrant=False, context_fn=routing_contexts)

    def switch_keeping(enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        switch(enable=enable, gradient_checkpointing_func=keeping, every_n_layers=every_n_layers)
        if offload_to is not None:
            checkpoint_layers_by(model, InputsOnHost(offload_to).checkpoint)

    model._set_gradient_checkpointing = switch_keeping  # type: ignore[method-assign]


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


# --- Inputs that wait on the host ---------------------------------------------------------------------------------


class _Kept:
    """A layer's input on the host and, from shortly before its recomputation on, on the device."""

    def __init__(self, left: AsyncCopy) -> None:
        self.left = left
        self.back: AsyncCopy | None = None


class InputsOnHost:
    """Checkpoints layers whose inputs go to the host in forward and come back in backward, each while the layer after
    it computes."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._back = CopyStream(device), CopyStream(device)
        self._kept: list[weakref.ref[_Kept]] = []  # in the order of forward; a graph that is let go takes its own away

    def checkpoint(self, function: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """`torch.utils.checkpoint.checkpoint`, for a layer whose first argument is what it transforms."""
        recomputed = partial(torch_checkpoint, function, use_reentrant=False, context_fn=routing_contexts)
        if hidden.is_leaf:  # a frozen embedding's output stays whatever happens: autograd holds on to leaves
            return recomputed(hidden, *args)
        left: list[AsyncCopy] = []
        storage = id(hidden.untyped_storage())  # the graph keeps what `pack` refers to

        def pack(tensor: Tensor) -> Tensor | _Kept:
            if id(tensor.untyped_storage()) != storage:
                return tensor  # a mask, say, which all layers share
            kept = _Kept(self._out.to_host(tensor))
            left.append(kept.left)
            self._kept = [*(ref for ref in self._kept if ref() is not None), weakref.ref(kept)]
            return kept

        def unpack(packed: Tensor | _Kept) -> Tensor:
            return self._bring(packed) if isinstance(packed, _Kept) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = recomputed(hidden, *args)
        for copy in left:
            copy.wait()  # the input may go when the layer is through, and not before it has left
        return output

    def _bring(self, kept: _Kept) -> Tensor:
        before: _Kept | None = None
        while self._kept:
            last = self._kept.pop()()
            if last is kept:
                before = next((one for ref in reversed(self._kept) if (one := ref()) is not None), None)
                break
        for one in (kept, before):
            if one is not None and one.back is None:
                one.back = self._back.to_device(one.left.copies)
        assert kept.back is not None
        (tensor,) = kept.back.wait()
        kept.back = None
        return tensor
