"""Activation checkpointing that keeps each layer's routing decisions.

A checkpointed layer runs its forward again during backward. Were the router to choose again, a tie or a
nondeterministic kernel could send a token elsewhere than the first time: the gradient would be that of another
function, or a shape would not match. So the chosen indices are kept (T·K integers a layer) and everything else is
recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PreTrainedModel

from moetune.compat.transformers import checkpoint_layers_by
from moetune.experts.bank import ExpertBank
from moetune.experts.host import AsyncCopy, CopyStream

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
    contexts = RoutersOf(model).contexts
    keeping = partial(checkpoint, use_reentrant=False, context_fn=contexts)

    def switch_keeping(enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        switch(enable=enable, gradient_checkpointing_func=keeping, every_n_layers=every_n_layers)
        if offload_to is not None:
            checkpoint_layers_by(model, InputsOnHost(offload_to, contexts).checkpoint)

    model._set_gradient_checkpointing = switch_keeping  # type: ignore[method-assign]


class RoutersOf:
    """Watches the routers of a model in checkpointed calls: from where a block with experts begins to where its experts
    do. Elsewhere no dispatch mode is on, because one costs microseconds for every operation."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._call: _Call | None = None
        self.banks = {path: module for path, module in model.named_modules() if isinstance(module, ExpertBank)}
        for path, bank in self.banks.items():
            block = model.get_submodule(path.rpartition(".")[0])
            block.register_forward_pre_hook(lambda *_: self._call and self._call.begin())
            bank.register_forward_pre_hook(lambda *_: self._call and self._call.end())

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts for the forward and the recomputation of one checkpointed call."""
        kept: list[Tensor] = []
        rows: list[list[int]] = []
        return _Call(self, _Record(kept), rows), _Call(self, _Replay(kept), rows)


class _Call:
    """One checkpointed call, the first time or again.

    Args:
        mode: is on while the routers of this call work.
        rows: that each expert receives, of each bank of the call; counted the first time, known again.
    """

    def __init__(self, routers: RoutersOf, mode: _Record | _Replay, rows: list[list[int]]) -> None:
        self._routers, self._mode, self._rows, self._is_on = routers, mode, rows, False

    def __enter__(self) -> None:
        self._outer, self._routers._call = self._routers._call, self
        self._mode.restart()
        self._stack = ExitStack()
        hooks = next((bank.hooks for bank in self._routers.banks.values()), None)
        if hooks is not None:
            known, count = iter(self._rows), hooks.count_rows

            def count_rows(layer: int, ids: Tensor, num_experts: int) -> list[int]:
                if isinstance(self._mode, _Replay):
                    return next(known)
                self._rows.append(count(layer, ids, num_experts))
                return self._rows[-1]

            self._stack.enter_context(hooks.using(count_rows=count_rows))

    def __exit__(self, *exception: Any) -> None:
        self.end()
        self._stack.close()
        self._routers._call = self._outer

    def begin(self) -> None:
        if not self._is_on:
            self._mode.__enter__()
            self._is_on = True

    def end(self) -> None:
        if self._is_on:
            self._mode.__exit__(None, None, None)
            self._is_on = False


class _Record(TorchDispatchMode):
    """Keeps the indices of every choice: `topk`, and `max` along a dimension, are how routers choose."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def restart(self) -> None:
        """A call begins."""
        self.kept.clear()

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

    def restart(self) -> None:
        """A call begins: anew each time, because a graph that is kept is recomputed at every backward."""
        self.left = iter(self.kept)

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

    def __init__(self, device: torch.device, contexts: Callable[[], tuple[Any, Any]]) -> None:
        self._out, self._back, self._contexts = CopyStream(device), CopyStream(device), contexts
        self._kept: list[weakref.ref[_Kept]] = []  # in the order of forward; a graph that is let go takes its own away

    def checkpoint(self, function: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """`torch.utils.checkpoint.checkpoint`, for a layer whose first argument is what it transforms."""
        recomputed = partial(torch_checkpoint, function, use_reentrant=False, context_fn=self._contexts)
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
