"""Activation checkpointing that replays the routers' choices, and optionally keeps layer inputs in host memory.

A checkpointed layer runs its forward pass again during the backward pass. If its router chose again, a tie or a
nondeterministic kernel could send a token to another expert than before: the gradient would be that of another
function, or shapes would not match. So the chosen indices are kept (T·K integers per layer, for T tokens and K experts
per token), and all else is recomputed.
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
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PreTrainedModel

from moetune.compat.transformers import checkpoint_by
from moetune.experts.bank import ExpertBank
from moetune.experts.context import ReadCounts
from moetune.experts.host import AsyncCopy, CopyStream
from moetune.experts.kernels import routing

aten = torch.ops.aten


def checkpoint_layers(model: PreTrainedModel, how: str, device: torch.device) -> None:
    """Set activation checkpointing of every decoder layer, in place: a layer keeps its input and its router's choices.

    `how` is `full`, or `offload`, which keeps the layers' inputs in host memory until the backward pass. With `none`
    and `experts_only` checkpointing stays off; if other code, such as a trainer, enables it later, it works as `full`.
    """
    contexts = RoutersOf(model).contexts
    keeping = partial(torch_checkpoint, use_reentrant=False, context_fn=contexts)
    checkpoint_by(model, InputsOnHost(device, contexts).checkpoint if how == "offload" else keeping)
    if how in ("full", "offload"):
        model.activation_checkpointing_enable()


class RoutersOf:
    """Hooks that record or replay the routers' choices in checkpointed calls.

    They are active from the start of an MoE block, where its router runs, to the start of its experts. Elsewhere no
    dispatch mode is active, because it costs microseconds per operation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.call: _Call | None = None
        self.banks = {path: module for path, module in model.named_modules() if isinstance(module, ExpertBank)}
        for path, bank in self.banks.items():
            block = model.get_submodule(path.rpartition(".")[0])
            block.register_forward_pre_hook(lambda *_: self.call and self.call.begin())
            bank.register_forward_pre_hook(lambda *_: self.call and self.call.end())

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the context managers for the forward pass and for the recomputation of one checkpointed call, as
        `context_fn` of `torch.utils.checkpoint` does. Choices are recorded in the first and replayed in the second."""
        kept: list[Tensor] = []
        rows: list[list[int]] = []
        return _Call(self, _Choices(kept, again=False), rows), _Call(self, _Choices(kept, again=True), rows)


class _Call:
    """Context of one checkpointed call: its forward pass, or its recomputation.

    Args:
        mode: the dispatch mode that records or replays choices; active while a router computes.
        rows: number of rows of each expert, for each bank of the call; filled in the forward pass, read in the
            recomputation.
    """

    def __init__(self, routers: RoutersOf, mode: _Choices, rows: list[list[int]]) -> None:
        self._routers, self._mode, self._rows, self._is_on = routers, mode, rows, False

    def __enter__(self) -> None:
        self._outer, self._routers.call = self._routers.call, self
        self._mode.restart()
        self._stack = ExitStack()
        hooks = next((bank.hooks for bank in self._routers.banks.values()), None)
        if hooks is not None:
            known, count = iter(self._rows), hooks.count_rows

            def count_rows(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
                if self._mode.again:
                    return next(known)
                self._rows.append(count(layer, ids, num_experts, read))
                return self._rows[-1]

            self._stack.enter_context(hooks.using(count_rows=count_rows, recomputes=self._mode.again))

    def __exit__(self, *exception: Any) -> None:
        self.end()
        self._stack.close()
        self._routers.call = self._outer

    def begin(self) -> None:
        """Activate the dispatch mode, if it is not active."""
        if not self._is_on:
            self._mode.__enter__()
            self._is_on = True

    def end(self) -> None:
        """Deactivate the dispatch mode, if it is active."""
        if self._is_on:
            self._mode.__exit__(None, None, None)
            self._is_on = False


class _Choices(TorchDispatchMode):
    """Dispatch mode that records the indices of every `choose`, `topk` and `max` along a dimension, by which routers
    choose. With `again`, it returns the recorded indices instead, and the values of the current input at these
    indices."""

    def __init__(self, kept: list[Tensor], *, again: bool) -> None:
        super().__init__()
        self.kept, self.again = kept, again

    def restart(self) -> None:
        """Go back to the first choice, at the start of a forward pass or of a recomputation."""
        if self.again:
            self.left = iter(self.kept)
        else:
            self.kept.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REPLAY and self.again:
            return _REPLAY[func](next(self.left), *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in _REPLAY:
            self.kept.append(out[1])
        return out


def _replay_topk(
    indices: Tensor, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    return input.gather(dim, indices), indices


def _replay_max(indices: Tensor, input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if keepdim:
        return input.gather(dim, indices), indices
    return input.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices


def _replay_choose(
    indices: Tensor, logits: Tensor, top_k: int, normalized: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return routing.weigh(logits, indices, normalized, dtype), indices


_REPLAY: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    aten.topk.default: _replay_topk,
    aten.max.dim: _replay_max,
    torch.ops.moetune.choose.default: _replay_choose,
}


# --- Inputs that wait on the host ---------------------------------------------------------------------------------


class _KeptInput:
    """A layer's input in host memory, and its copy on the device from shortly before the recomputation."""

    def __init__(self, left: AsyncCopy) -> None:
        self.left = left
        self.back: AsyncCopy | None = None


class InputsOnHost:
    """Checkpoints layers with their inputs in host memory. An input is copied to the host in the forward pass, and back
    in the backward pass while the layer above it runs its own."""

    def __init__(self, device: torch.device, contexts: Callable[[], tuple[Any, Any]]) -> None:
        self._out, self._back, self._contexts = CopyStream(device), CopyStream(device), contexts
        self._kept: list[weakref.ref[_KeptInput]] = []  # in forward order; dead once their graph is freed

    def checkpoint(self, function: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """Replacement for `torch.utils.checkpoint.checkpoint`, for layers whose first argument is the hidden states.

        Only `hidden` is kept on the host; further arguments stay on the device, and so does a leaf of the graph, which
        autograd holds anyway.
        """
        recomputed = partial(torch_checkpoint, function, use_reentrant=False, context_fn=self._contexts)
        if hidden.is_leaf:  # such as a frozen embedding's output: autograd keeps leaves anyway
            return recomputed(hidden, *args)
        left: list[AsyncCopy] = []
        storage = id(hidden.untyped_storage())  # an id, because the graph would keep any tensor that `pack` refers to

        def pack(tensor: Tensor) -> Tensor | _KeptInput:
            if id(tensor.untyped_storage()) != storage:
                return tensor  # for example a mask, which all layers share
            kept = _KeptInput(self._out.to_host(tensor))
            left.append(kept.left)
            self._kept = [*(ref for ref in self._kept if ref() is not None), weakref.ref(kept)]
            return kept

        def unpack(packed: Tensor | _KeptInput) -> Tensor:
            return self._bring(packed) if isinstance(packed, _KeptInput) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = recomputed(hidden, *args)
        for copy in left:
            copy.wait()  # the input may be freed after this layer, but not before it is copied
        return output

    def _bring(self, kept: _KeptInput) -> Tensor:
        """Return an input on the device, and start copying the input of the layer before, which backward needs next."""
        before: _KeptInput | None = None
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
