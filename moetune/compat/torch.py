"""torch."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Mode = TypeVar("_Mode", bound=type[TorchDispatchMode])
NO_PASS = -1
__all__ = ["unset_fake_temporarily"]


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread; `NO_PASS` outside of one.

    Checkpointing in torch itself asks this way; there is no public one.
    """
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the backward pass that runs now has ended, as FSDP2 and DDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_DISPATCHING = ("__torch_dispatch__", "_fn", "inner", "__call__")
"""Functions between an operation and its caller, under one dispatch mode or several."""


def called_by_autograd() -> bool:
    """Whether the operation that a dispatch mode is running was called by autograd's engine, not by Python code.

    To be called by `__torch_dispatch__` itself. There is no public way: the engine's frame is looked for.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _DISPATCHING:
        frame = frame.f_back
    return frame.f_code is _engine_run_backward.__code__


@contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `note` is called after each resizing of a storage.

    FSDP2 gives its gathered weights memory, and takes it away, by `UntypedStorage.resize_`, which is no operation: no
    dispatch mode sees it.
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
    """Lets fake tensors run fused SGD. torch has no kernel of it for them: it would run the real one on real zeros, of
    the size of everything that trains."""
    fakes = torch.library.Library("aten", "IMPL")
    for overload in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
        fakes.impl(overload, lambda *args, **kwargs: None, "Meta")
    return fakes


def _operations(names: str) -> frozenset[Any]:
    """Of `NAME.OVERLOAD ...`, each an ATen operation."""
    return frozenset(operator.attrgetter(name)(torch.ops.aten) for name in names.split())


_IN_PLACE = _operations("add_.Tensor addmm_.default copy_.default index_add_.default index_copy_.default mul_.Tensor")
_ON_META = _IN_PLACE | _operations(
    "_to_copy.default _unsafe_view.default add.Tensor alias.default as_strided.default bmm.default cat.default "
    "detach.default div.Scalar div.Tensor expand.default gather.default linalg_vector_norm.default mean.dim mm.default "
    "mul.Scalar mul.Tensor neg.default permute.default pow.Tensor_Scalar rsqrt.default select.int silu.default "
    "silu_backward.default slice.Tensor split.Tensor split_with_sizes.default squeeze.dim sum.dim_IntList t.default "
    "transpose.int unsqueeze.default view.default view.dtype"
)


class _Made(NamedTuple):
    """All that there is to a fake tensor which fills its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: FakeTensor) -> _Made:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device)

    def again(self, mode: FakeTensorMode) -> FakeTensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, made, self.device)


@functools.cache
def _makes_anew(func: Any) -> bool:
    """Whether an operation changes nothing, and says that it returns no view."""
    schema = func._schema
    return not schema.is_mutable and all(made.alias_info is None for made in schema.returns)


def unguarded(mode: _Mode) -> _Mode:
    """A dispatch mode without torch's guard against compiling it, which takes as long as many an operation: nothing is
    compiled under ours."""
    mode.__torch_dispatch__ = inspect.unwrap(mode.__torch_dispatch__)  # type: ignore[method-assign]
    return mode


@unguarded
class QuickFakeMode(FakeTensorMode):
    """Fake tensors, whose operations take a third of the time.

    For each operation torch looks for the way to fake it. For the commonest, listed above, it need not: a fake tensor
    is a meta tensor with another device's name, and the operation's own shape function runs on that. And what an
    operation has made once, it makes again of tensors of the same sizes. Torch remembers that too, but by a key that
    takes longer to make, and not of operators of other libraries.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[Hashable, tuple[type, list[_Made]] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = self._key((func, *args, *kwargs.items())) if _makes_anew(func) else None
        if key is None:
            return self._make(func, types, args, kwargs)
        if key not in self._known:
            out = self._make(func, types, args, kwargs)
            self._known[key] = _noted(out, (args, kwargs))
            return out
        if (known := self._known[key]) is None:
            return self._make(func, types, args, kwargs)
        kind, made = known
        tensors = [one.again(self) for one in made]
        if kind is list:
            return tensors
        return tensors[0] if kind is FakeTensor else tuple(tensors)

    def _make(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        device = self._device_of(args) if func in _ON_META and "device" not in kwargs else None
        if device is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with in_kernel_invocation_manager(self):
            out = func(*args, **kwargs)
        if func in _IN_PLACE:
            return args[0]
        return FakeTensor(self, out, device) if isinstance(out, Tensor) else [FakeTensor(self, o, device) for o in out]

    def _key(self, value: Any) -> Hashable | None:
        """Of an operation's arguments, what the sizes of its results depend on; None if they depend on values."""
        if isinstance(value, Tensor):
            is_ours = isinstance(value, FakeTensor) and value.fake_mode is self and value.constant is None
            return _Made.of(value) if is_ours else None  # type: ignore[arg-type]
        if isinstance(value, (list, tuple)):
            keys = tuple([self._key(one) for one in value])
            return None if None in keys else keys
        return type(value), value  # 1, 1.0 and True make different tensors

    def _device_of(self, args: Any) -> torch.device | None:
        """The device of all tensors among the arguments, if they are this mode's and of none the values are known."""
        device = None
        for value in args:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, Tensor):
                    continue
                if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self or tensor.constant is not None:
                    return None
                if device not in (None, tensor.fake_device):
                    return None
                device = tensor.fake_device
        return device


def _noted(out: Any, arguments: Any) -> tuple[type, list[_Made]] | None:
    """What was made, if it is nothing but tensors, each of which fills memory of its own."""
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
    """Inside, this process is that rank of so many: collectives return at once, and bring nothing.

    The backend is for torch's own tests. Beside it, torch replaces `sys.excepthook` by one that names the rank, and
    DTensor remembers meshes, which know groups by names that are gone afterwards: both are undone.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert not dist.is_initialized(), "a rank of a running job cannot be another one's fake"
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
        stack.callback(_clear_sharding_prop_cache)
        stack.callback(dist.destroy_process_group)
        yield


def process_group(name: str) -> dist.ProcessGroup:
    """A process group by the name that functional collectives are given."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(name))


def is_observed(tensor: Tensor) -> bool:
    """Whether a dispatch mode, a profiler or a tensor subclass has to see the operators on a tensor."""
    return (
        type(tensor) not in (Tensor, nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()
    )


def all_to_all(rows: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of a group, so many to each, and return those received; differentiable.

    Waits at once: the pending result of a functional all-to-all has no memory yet (huggingface/transformers#49421).
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    return wait_tensor(all_to_all_single_autograd(rows, receives, sends, group))


def watch_out_of_memory(note: Callable[[int, int, int, int], None]) -> None:
    """Calls `note` whenever torch's CUDA allocator is about to raise `OutOfMemoryError`, for good: with the device, the
    bytes that were asked for, the card's bytes, and those of them that are free.

    Torch's documentation takes memory snapshots this way (pytorch.org/docs/stable/torch_cuda_memory).
    """
    torch._C._cuda_attach_out_of_memory_observer(note)  # type: ignore[attr-defined]


def shard_place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and the shape of this rank's part of a DTensor, by dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def consolidate(folder: Path, names: list[str]) -> Path:
    """Join the safetensors that several ranks wrote into one file of whole tensors, on disk; return it."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    whole = folder / "whole"
    whole.mkdir()
    consolidate_safetensors_files(str(folder), str(whole), dict.fromkeys(names, 1))
    return next(whole.glob("*.safetensors"))
