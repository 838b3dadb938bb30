"""Activation checkpointing that replays routers' choices, keeps more of some layers, or offloads inputs.

A checkpointed layer runs its forward pass again during the backward pass. If its router chose again, a tie or a
nondeterministic kernel could send a token to another expert than before: the gradient would be that of another
function, or shapes would not match. So the chosen indices are kept (T·K integers per layer, for T tokens and K experts
per token), and all else is recomputed.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PreTrainedModel

from moetune.adapt.attention import is_varlen
from moetune.adapt.layers.routers import records_choices
from moetune.compat.torch import unguarded
from moetune.compat.transformers import checkpoint_by
from moetune.experts.bank import ExpertBank
from moetune.experts.context import ExpertHooks, ReadCounts
from moetune.experts.host import AsyncCopy, CopyStream
from moetune.kernels import routing
from moetune.models.stack import decoder_layers
from moetune.models.structure import ModelStructure
from moetune.run.keeps import NOTHING, recomputes_layers
from moetune.run.resolved import ResolvedRun

aten = torch.ops.aten


def checkpoint_layers(model: PreTrainedModel, run: ResolvedRun, device: torch.device) -> None:
    """Set activation checkpointing of every decoder layer, in place.

    A checkpointed layer keeps its input, its routers' choices, and what `run.keeps` lists for it: the outputs of
    attention's kernels, gate_up rows, or all the rest, with which it is not recomputed. With
    `train.checkpointing: offload` inputs, or those of the layers `host`, are in host memory until the backward pass.

    With `none` and `experts_only` checkpointing stays off. If other code, such as a trainer, enables it later, it is on
    in every layer.
    """
    train, paths = run.config.train, decoder_layers(model)
    numbers = {path: int(path.rpartition(".")[2]) for path in paths if path[-1].isdigit()}  # not layers within layers
    by_kernels = {path for path, number in numbers.items() if "attention" in run.keeps.get(number, NOTHING)}
    contexts = ChoicesOf(model, _attention_in(by_kernels, run.structure)).contexts
    keeping = partial(torch_checkpoint, use_reentrant=False, context_fn=contexts)
    on_host = InputsOnHost(device, contexts).checkpoint
    waiting = [paths[path] for path, number in numbers.items() if "host" in run.keeps.get(number, NOTHING)]
    checkpoint_by(model, on_host if train.checkpointing == "offload" else keeping, dict.fromkeys(waiting, on_host))
    if recomputes_layers(train):
        model.activation_checkpointing_enable()
        for path, number in numbers.items():
            if "rest" in run.keeps.get(number, NOTHING):
                paths[path].gradient_checkpointing = False  # type: ignore[assignment]


def _attention_in(layers: Collection[str], structure: ModelStructure) -> list[str]:
    """Return the paths of the modules directly below these decoder layers that have attention's parameters."""
    paths = (
        ".".join((layer, part.name[len(layer) + 1 :].partition(".")[0]))
        for part in structure.parameters_of("attention")
        for layer in layers
        if part.name.startswith(f"{layer}.")
    )
    return list(dict.fromkeys(paths))


class ChoicesOf:
    """Hooks that record, and in the recomputation replay, what the checkpointed calls of a model must not compute anew.

    These are the routers' choices and, in the modules whose paths are in `attention`, the outputs of attention's
    kernels. The hooks are active from the start of an MoE block, where its router runs, to the start of its experts,
    and in the modules `attention`, of which variable-length attention activates them for its kernel alone. Elsewhere no
    dispatch mode is active, because it costs microseconds per operation; fused routers (layers/routers.py) need none.
    Create one object for a model, and pass `contexts` to every checkpointed call.
    """

    def __init__(self, model: PreTrainedModel, attention: Iterable[str] = ()) -> None:
        self.call: _Call | None = None
        self.hooks = ExpertHooks()  # replaced by those that all banks share
        for path, bank in model.named_modules():
            if not isinstance(bank, ExpertBank):
                continue
            self.hooks = bank.hooks
            block = model.get_submodule(path.rpartition(".")[0])
            router: Any = next((child for child in block.children() if hasattr(child, "choices")), None)
            if router is not None:
                router.choices = lambda: self.call and self.call.mode
            block.register_forward_pre_hook(partial(self._begin, router))
            bank.register_forward_pre_hook(lambda *_: self.call and self.call.end())
        for path in attention:
            module = model.get_submodule(path)
            module.register_forward_pre_hook(lambda *_: None if is_varlen(model) else self.call and self.call.begin())
            module.register_forward_hook(lambda *_: self.call and self.call.end())
            for part in module.modules():
                part.__dict__["around_kernel"] = self._recording

    def _begin(self, router: Any, *_: Any) -> None:
        """Start the call's hooks, as an MoE block's forward pre-hook, unless its router records its choices itself."""
        if self.call and not records_choices(router):
            self.call.begin()

    def _recording(self) -> AbstractContextManager[Any]:
        """Return the dispatch mode of the call that runs, to be active within a `with` block; if none runs, nothing."""
        return nullcontext() if self.call is None else self.call.mode

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the context managers for the forward pass and for the recomputation of one checkpointed call.

        This is a `context_fn` of `torch.utils.checkpoint`. What the first records, the second replays.
        """
        kept: list[Any] = []
        return _Call(self, _Choices(kept, again=False)), _Call(self, _Choices(kept, again=True))


class _Call:
    """Context of one checkpointed call: its forward pass, or its recomputation.

    Args:
        routers: the hooks, which call `begin` and `end` while this context is entered.
        mode: the dispatch mode that records or replays; active while a router or a module of attention computes. The
            number of rows of each expert is recorded and replayed too, for each bank of the call.
    """

    def __init__(self, routers: ChoicesOf, mode: "_Choices") -> None:
        self._routers, self.mode, self._is_on = routers, mode, False

    def __enter__(self) -> None:
        self._outer, self._routers.call = self._routers.call, self
        self.mode.restart()
        count = self._routers.hooks.count_rows

        def count_rows(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
            if self.mode.again:
                return self.mode.next()
            self.mode.kept.append(count(layer, ids, num_experts, read))
            return self.mode.kept[-1]

        self._hooks = self._routers.hooks.using(count_rows=count_rows, recomputes=self.mode.again)
        self._hooks.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.end()
        self._hooks.__exit__(None, None, None)
        self._routers.call = self._outer

    def begin(self) -> None:
        """Activate the dispatch mode, if it is not active."""
        if not self._is_on:
            self.mode.__enter__()
            self._is_on = True

    def end(self) -> None:
        """Deactivate the dispatch mode, if it is active."""
        if self._is_on:
            self.mode.__exit__(None, None, None)
            self._is_on = False


@unguarded
class _Choices(TorchDispatchMode):
    """Dispatch mode that records routers' choices and the outputs of attention's kernels in `kept`, or replays them.

    Choices are the indices that `topk`, `max` along a dimension and moetune's `choose` return. A mode with `again`
    replays: these operators return the recorded indices, with the values that the current input has there, and kernels
    the recorded outputs, but only once: a second recomputation runs them. Call `restart` before each pass.

    Outputs are kept as the forward pass left them: what it changed in them in place is not changed again.
    """

    def __init__(self, kept: list[Any], *, again: bool) -> None:
        super().__init__()
        self.kept, self.again = kept, again

    def restart(self) -> None:
        """Go back to the first record, at the start of a forward pass or of a recomputation."""
        self.at, self.returned = 0, set[int]()
        if not self.again:
            self.kept.clear()

    def next(self) -> Any:
        """Return the next record."""
        self.at += 1
        return self.kept[self.at - 1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REPLAY and self.again:
            return _REPLAY[func](self.next(), *args, **kwargs)
        if func.name() in _KERNELS and not _has_dropout(func, args, kwargs):
            return self._kernel(func, args, kwargs)
        if self.returned and _is_in_place(func) and id(args[0].untyped_storage()) in self.returned:
            return args[0]
        out = func(*args, **kwargs)
        if func in _REPLAY:
            self.kept.append(out[1])
        return out

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel and record its outputs; in a recomputation return the recorded ones."""
        if self.again and (out := self.next()) is not None:
            self.kept[self.at - 1] = None
            self.returned |= {id(leaf.untyped_storage()) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
            return out
        out = func(*args, **kwargs)
        if not self.again:  # detached: autograd makes the outputs themselves part of the graph, which holds the record
            self.kept.append(tree_map_only(Tensor, Tensor.detach, out))
        return out


_KERNELS = frozenset((
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
    "aten::logaddexp",
))  # fmt: skip
"""Operators of attention whose outputs are recorded; `logaddexp` adds the sinks (flash.py)."""


def _is_in_place(func: Any) -> bool:
    """Return whether an operator changes its first argument, and returns it."""
    first = func._schema.arguments[:1]
    return bool(first and first[0].alias_info is not None and first[0].alias_info.is_write)


def _has_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator drops elements at random: replaying it would leave the random generator behind."""
    names = [argument.name for argument in func._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))


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


class InputsOnHost:
    """Checkpoints layers with their inputs in host memory. An input is copied to the host in the forward pass, and back
    in the backward pass while the layer above it runs its own. `contexts` is a `context_fn` of torch's checkpoint."""

    def __init__(self, device: torch.device, contexts: Callable[[], tuple[Any, Any]]) -> None:
        self._out, self._back, self._contexts = CopyStream(device), CopyStream(device), contexts
        self._kept: list[weakref.ref[AsyncCopy]] = []  # in forward order; dead once their graph is freed
        self._arriving = weakref.WeakKeyDictionary[AsyncCopy, AsyncCopy]()  # input on the host -> copy on the device

    def checkpoint(self, function: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """Replace `torch.utils.checkpoint.checkpoint`, for layers whose first argument is the hidden states.

        Only `hidden` waits in host memory; further arguments stay on the device, and so does a leaf of the graph, which
        autograd holds anyway.
        """
        recomputed = partial(torch_checkpoint, function, use_reentrant=False, context_fn=self._contexts)
        if hidden.is_leaf:  # such as a frozen embedding's output: autograd keeps leaves anyway
            return recomputed(hidden, *args)
        left: list[AsyncCopy] = []
        storage = id(hidden.untyped_storage())  # an id, because the graph would keep any tensor that `pack` refers to

        def pack(tensor: Tensor) -> Tensor | AsyncCopy:
            if id(tensor.untyped_storage()) != storage:
                return tensor  # for example a mask, which all layers share
            left.append(self._out.to_host(tensor))
            self._kept = [*(ref for ref in self._kept if ref() is not None), weakref.ref(left[-1])]
            return left[-1]

        def unpack(packed: Tensor | AsyncCopy) -> Tensor:
            return self._bring(packed) if isinstance(packed, AsyncCopy) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = recomputed(hidden, *args)
        for copy in left:
            copy.wait()  # the input may be freed after this layer, but not before it is copied
        return output

    def _bring(self, kept: AsyncCopy) -> Tensor:
        """Return an input on the device, and start copying the input of the layer before, which backward needs next."""
        before: AsyncCopy | None = None
        while self._kept:
            last = self._kept.pop()()
            if last is kept:
                before = next((alive for ref in reversed(self._kept) if (alive := ref()) is not None), None)
                break
        for waiting in (kept, before):
            if waiting is not None and waiting not in self._arriving:
                self._arriving[waiting] = self._back.to_device(waiting.copies)
        (tensor,) = self._arriving.pop(kept).wait()
        return tensor
