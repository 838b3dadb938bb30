"""torch: private interfaces of autograd, attention, fake tensors, process groups, checkpoints, the CUDA allocator."""

import functools
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # defines its operators
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Mode = TypeVar("_Mode", bound=type[TorchDispatchMode])
NO_PASS = -1
__all__ = ["unset_fake_temporarily"]


class HostModule(nn.Module):
    """A module whose tensors `to`, `cuda`, `half` and their like leave where they are while `on_host` is true.

    `nn.Module` has no public way to exempt a module: all of these call the private `_apply` of each submodule.
    """

    @property
    def on_host(self) -> bool:
        """Whether the tensors stay in host memory now; subclasses define it."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HostModule":
        return self if self.on_host else super()._apply(fn, recurse)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float, window: int
) -> tuple[Tensor, ...]:
    """Run torch's flash attention for CUDA, causal within each of n documents that lie one after the other.

    Returns the output [T, h, d], the logsumexp float32 [h, T], and two states for `varlen_backward`. The kernel is that
    of `torch.nn.attention.varlen.varlen_attn`, without its launches for a random state and, in backward, for two
    gradients, which nobody reads.

    Args:
        q, k, v: [T, h, d] for queries, [T, h_kv, d] for keys and values.
        starts: index of the first token of each document, and T: int32 [n + 1].
        longest: tokens of the longest document.
        scaling: factor of the scores.
        window: number of last tokens, its own included, that a token attends to; 0 for all.
    """
    out, lse, *states, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, not window, False, **_flash_options(scaling, window)
    )
    return out, lse, *states


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    states: Sequence[Tensor],
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given that of the output, `dout` [T, h, d].

    The other arguments are the arguments and results of `varlen_forward`; `states` are its two last results.
    """
    how = (starts, starts, longest, longest, 0.0, not window, *states)
    return torch.ops.aten._flash_attention_backward(dout, q, k, v, out, lse, *how, **_flash_options(scaling, window))


def _flash_options(scaling: float, window: int) -> dict[str, float]:
    return {"scale": scaling, "window_size_left": window - 1, "window_size_right": 0}


def backward_pass() -> int:
    """Return the number of the backward pass that runs on this thread, or `NO_PASS` if none does.

    torch's activation checkpointing uses the same private function; there is no public one.
    """
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that is running, as FSDP2 and DDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_DISPATCHING = ("__torch_dispatch__", "_fn", "inner", "__call__")
"""Names of the functions on the call stack between an operation and its caller, under any number of dispatch modes."""


def called_by_autograd() -> bool:
    """Return whether autograd's engine, not Python code, called the operation that a dispatch mode is handling.

    Call it directly in the mode's `__torch_dispatch__`. torch has no public function for it; this one looks for the
    engine's frame on the call stack.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _DISPATCHING:
        frame = frame.f_back
    return frame.f_code is _engine_run_backward.__code__


@contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `note` with the storage after each `UntypedStorage.resize_` within the `with` block.

    FSDP2 allocates and frees its gathered weights that way, which no dispatch mode sees.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        note(storage)
        return storage

    with patch.object(torch.UntypedStorage, "resize_", resize_and_note):
        yield


@functools.cache
def add_missing_fakes() -> torch.library.Library:
    """Register fake kernels for fused SGD, which torch lacks; return the library that holds them.

    Without them torch would run the real kernel on real zeros. Done once per process.
    """
    fakes = torch.library.Library("aten", "IMPL")
    for overload in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
        fakes.impl(overload, lambda *args, **kwargs: None, "Meta")
    return fakes


@contextmanager
def without_fake_reports() -> Iterator[None]:
    """Stop torch from printing the errors of operations on fake tensors, which it also raises, within the `with`."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _operations(names: str) -> frozenset[Any]:
    """Return the ATen operations named in a string of `NAME.OVERLOAD` separated by spaces."""
    return frozenset(operator.attrgetter(name)(torch.ops.aten) for name in names.split())


_IN_PLACE = _operations(
    "add_.Tensor addmm_.default bitwise_and_.Scalar copy_.default exp_.default index_add_.default index_copy_.default "
    "index_put_.default mul_.Tensor pow_.Scalar scatter_add_.default sub_.Tensor zero_.default"
)
_ON_META = _IN_PLACE | _operations(
    "_to_copy.default _unsafe_view.default add.Tensor alias.default as_strided.default bmm.default cat.default "
    "detach.default div.Scalar div.Tensor expand.default gather.default linalg_vector_norm.default mean.dim mm.default "
    "mul.Scalar mul.Tensor neg.default permute.default pow.Tensor_Scalar rsqrt.default select.int silu.default "
    "silu_backward.default slice.Tensor split.Tensor split_with_sizes.default squeeze.dim sum.dim_IntList t.default "
    "transpose.int unbind.int unsqueeze.default view.default view.dtype"
)


_ONLY_VALUES = ("moetune", "bitsandbytes", "fsdp")
"""Namespaces whose operators, when they write to an argument, change its values but no shape, stride or storage."""


_DEVICE = torch.ops.prim.device.default
_LIFT = torch.ops.aten.lift_fresh.default
"""Makes what `torch.tensor` returns known to dispatch modes."""
_META = torch.device("meta")


class _Made(NamedTuple):
    """Description of a fake tensor that fills its storage, from which an equal one can be made."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: FakeTensor) -> "_Made":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device)


def _makes_anew(func: Any) -> bool:
    """Return whether an operation's results are new tensors, by its schema: it returns no view and mutates no argument.

    Operators of moetune and bitsandbytes may mutate arguments: that changes only values, which fake tensors lack.
    """
    schema = func._schema
    mutates = schema.is_mutable and func.namespace not in _ONLY_VALUES
    return not mutates and all(made.alias_info is None for made in schema.returns)


_Way = Literal["nothing", "passed on", "in place", "anew", "on meta", "by torch"]


class _Ways(dict[int, tuple[_Way, bool]]):
    """id of an operation, which torch never frees and hashes slowly -> how `QuickFakeMode` runs it, and whether it can
    run directly on meta tensors.

    "nothing": not at all; "passed on": outside of the mode; "in place": by returning the first argument; "anew": from
    the cache of results; "on meta": on the meta tensors inside the fake ones; "by torch": as torch's own mode does.
    """

    def of(self, func: Any) -> tuple[_Way, bool]:
        """Return the entry of an operation."""
        if (known := self.get(id(func))) is None:
            known = self[id(func)] = _way_of(func), func in _ON_META
        return known


def _way_of(func: Any) -> _Way:
    if func.namespace in _ONLY_VALUES and not func._schema.returns:
        return "nothing"  # has no effect on fake tensors
    if func.namespace == "profiler":
        return "passed on"
    if func in _IN_PLACE:
        return "in place"
    return "anew" if _makes_anew(func) else "on meta" if func in _ON_META else "by torch"


_WAYS = _Ways()
_MISSING: Any = object()
"""Stands for what the cache of results does not have."""


def unguarded(mode: _Mode) -> _Mode:
    """Class decorator that removes torch's guard against compilation from a dispatch mode.

    The guard is slow, and nothing is compiled under moetune's modes. Returns the same class.
    """
    mode.__torch_dispatch__ = inspect.unwrap(mode.__torch_dispatch__)  # type: ignore[method-assign]
    return mode


def answering_no() -> AbstractContextManager[Any]:
    """Return a context in which a fake tensor that is asked whether it is true says no, instead of raising an error.

    It may be asked by `bool` or, if its dtype is bool, by `item`.
    """

    def item(self: FakeTensor) -> Any:
        return False if self.dtype == torch.bool else torch.Tensor.item(self)

    return patch.multiple(FakeTensor, __bool__=lambda self: False, item=item)


@unguarded
class QuickFakeMode(FakeTensorMode):
    """A `FakeTensorMode` whose operations take a third of the time of torch's.

    The most common operations (`_ON_META`) run their shape function directly on the meta tensor inside a fake tensor,
    without torch's search for an implementation. Operations in place, and operators of moetune and bitsandbytes that
    return nothing, do nothing. Results of all operations that return new tensors are cached by shapes, strides, dtypes
    and other arguments. torch's own cache has a slower key and leaves out operators of other libraries.
    """

    _known: ClassVar[dict[Hashable, tuple[type, list[_Made]] | None]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of any fake tensor on a device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (way, on_meta), kwargs = _WAYS.of(func), kwargs or {}
        if way == "nothing":
            return None
        if way == "passed on":
            return func(*args, **kwargs)
        if func is _DEVICE and type(args[0]) is FakeTensor and not self.in_kernel_invocation:
            return args[0].fake_device  # a shortcut: torch asks for it very often
        key = self._key((id(func), *args, *kwargs.items())) if way == "anew" else None
        known = None if key is None else self._known.get(key, _MISSING)
        if known is None:
            return self._make(func, types, args, kwargs, way, on_meta)
        if known is _MISSING:
            out = self._make(func, types, args, kwargs, way, on_meta)
            self._known[key] = _noted(out, (args, kwargs))
            return out
        kind, made = known
        tensors = [
            self._fake(torch.empty_strided(size, stride, dtype=dtype, device=_META), device)
            for size, stride, dtype, device in made
        ]
        if kind is list:
            return tensors
        return tensors[0] if kind is FakeTensor else tuple(tensors)

    def _make(self, func: Any, types: Any, args: Any, kwargs: Any, way: _Way, on_meta: bool) -> Any:
        if func is _LIFT and type(args[0]) is Tensor and args[0].numel() > 1:  # of fewer torch keeps the values
            made = args[0]
            return self._fake(
                torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=_META), made.device
            )
        device = self._device_of(args) if on_meta and "device" not in kwargs else None
        if device is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if way == "in place":
            return args[0]
        # as torch's `in_kernel_invocation_manager`, which takes longer than most operations
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            torch._C._set_meta_in_tls_dispatch_include(True)
            self.in_kernel_invocation = True
            try:
                out = func(*args, **kwargs)
            finally:
                self.in_kernel_invocation = False
        return self._fake(out, device) if isinstance(out, Tensor) else [self._fake(o, device) for o in out]

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor on `device` around `meta`: `FakeTensor(self, meta, device)` without its checks."""
        if (attributes := self._attributes.get(device)) is None:
            fake = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(fake))
            return fake
        fake = Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        vars(fake).update(attributes)
        return fake

    def _key(self, values: Any) -> Hashable | None:
        """Return a cache key of an operation's arguments; None if results may depend on tensor values."""
        keys: list[Hashable] = []
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None:
                    return None
                keys.append((value.shape, value.stride(), value.dtype, value.fake_device))
            elif kind is list or kind is tuple:
                if (inside := self._key(value)) is None:
                    return None
                keys.append(inside)
            elif kind is Tensor:  # torch makes it a fake tensor, whose values are not known
                keys.append(("real", value.shape, value.stride(), value.dtype, value.device))
            elif isinstance(value, Tensor):
                return None
            else:
                keys.append((kind, value))  # 1, 1.0 and True are equal but give different dtypes
        return tuple(keys)

    def _device_of(self, args: Any) -> torch.device | None:
        """Return the device that all tensors in `args` share; None without one, or if a tensor has a constant value."""
        device = None
        for value in args:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if type(tensor) is FakeTensor and tensor.fake_mode is self and tensor.constant is None:
                    if device is not None and device != tensor.fake_device:
                        return None
                    device = tensor.fake_device
                elif isinstance(tensor, Tensor):
                    return None
        return device


def _noted(out: Any, arguments: Any) -> tuple[type, list[_Made]] | None:
    """Describe an operation's results for the cache: (type of the result, descriptions of the tensors).

    None unless all results are fake tensors, each of which fills a storage that none of the `arguments` shares.
    """
    made = [out] if isinstance(out, Tensor) else out
    if not isinstance(made, (list, tuple)) or any(
        not isinstance(one, FakeTensor) or one.constant is not None for one in made
    ):
        return None
    noted = [_Made.of(one) for one in made]
    storages = [one.untyped_storage() for one in made]
    there = {id(leaf.untyped_storage()) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
    sizes = [
        torch.empty_strided(one.size, one.stride, dtype=one.dtype, device="meta").untyped_storage().nbytes()
        for one in noted
    ]
    is_anew = len({id(storage) for storage in storages} - there) == len(made)
    return (type(out), noted) if is_anew and sizes == [storage.nbytes() for storage in storages] else None


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """Initialize torch.distributed as rank `rank` of `size` without other processes, within the `with` block.

    Collectives return at once and send nothing. The backend is the one of torch's own tests. DTensor finds the shape of
    a result by running the operator on fake tensors of the whole shape; active dispatch modes do not see these. torch
    also replaces `sys.excepthook`, and DTensor caches meshes whose groups no longer exist afterwards; both are undone.
    Raises `AssertionError` if torch.distributed is initialized already.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed import fake_pg  # registers the backend
    from torch.utils._python_dispatch import _disable_current_modes

    assert not dist.is_initialized(), "a rank of a running job cannot be another one's fake"
    find_shape = ShardingPropagator._propagate_tensor_meta_non_cached
    with ExitStack() as stack:
        unseen = _disable_current_modes()(find_shape)
        stack.enter_context(patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
        stack.callback(_clear_sharding_prop_cache)
        stack.callback(dist.destroy_process_group)
        yield


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group that functional collectives know by `name`."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(name))


def is_observed(tensor: Tensor) -> bool:
    """Return whether a dispatch mode, profiler or tensor subclass must see the operators that run on a tensor."""
    return (
        type(tensor) not in (Tensor, nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()
    )


def all_to_all(rows: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows [N, …], sorted by destination, to the ranks of `group`; return the received rows. Differentiable.

    `receives` and `sends` are the numbers of rows from and to each rank. Waits for the result, because the pending
    result of a functional all-to-all has no memory yet (huggingface/transformers#49421).
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    return wait_tensor(all_to_all_single_autograd(rows, receives, sends, group))


def watch_out_of_memory(note: Callable[[int, int, int, int], None]) -> None:
    """Call `note` whenever torch's CUDA allocator is about to raise `OutOfMemoryError`, for the rest of the process.

    It receives the device's index and, in bytes, the refused request, the GPU's total memory and its free memory.
    Source: torch's documentation of memory snapshots (pytorch.org/docs/stable/torch_cuda_memory).
    """
    torch._C._cuda_attach_out_of_memory_observer(note)  # type: ignore[attr-defined]


def shard_place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset, shape) of this rank's part of a DTensor, with one number per dimension in each."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def consolidate(folder: Path, names: list[str]) -> Path:
    """Join the safetensors files of several ranks into one file of whole tensors, without loading them all into memory.

    `folder` has the files that torch.distributed.checkpoint wrote, with the tensors `names`. The result is the path of
    the new file, in the new folder `folder`/whole.
    """
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    whole = folder / "whole"
    whole.mkdir()
    consolidate_safetensors_files(str(folder), str(whole), dict.fromkeys(names, 1))
    return next(whole.glob("*.safetensors"))
