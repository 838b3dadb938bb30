"""torch: private interfaces of autograd, attention, process groups, checkpoints and the CUDA allocator."""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # defines its operators
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

_Mode = TypeVar("_Mode", bound=type[TorchDispatchMode])
NO_PASS = -1


class HostModule(nn.Module):
    """A module some of whose buffers `to`, `cuda`, `half` and their like leave where they are, in host memory.

    `nn.Module` has no public way to exempt a tensor: all of these call the private `_apply` of each submodule.
    """

    def names_on_host(self) -> Collection[str]:
        """Return the names of the module's own buffers that stay in host memory; subclasses define it."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HostModule":
        with without_host_tensors([self]):
            return super()._apply(fn, recurse)


@contextmanager
def without_host_tensors(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Take the buffers that stay in host memory (`HostModule`) out of the modules within the `with` block.

    FSDP2 too moves all buffers of what it shards to its device.
    """
    left = [
        (module, {name: module._buffers.pop(name) for name in module.names_on_host()})
        for module in modules
        if isinstance(module, HostModule)
    ]
    try:
        yield
    finally:
        for module, buffers in left:
            module._buffers.update(buffers)


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


def unguarded(mode: _Mode) -> _Mode:
    """Class decorator that removes torch's guard against compilation from a dispatch mode.

    The guard is slow, and nothing is compiled under moetune's modes. Returns the same class.
    """
    mode.__torch_dispatch__ = inspect.unwrap(mode.__torch_dispatch__)  # type: ignore[method-assign]
    return mode


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """Initialize torch.distributed as rank `rank` of `size` without other processes, within the `with` block.

    Collectives return at once and send nothing. The backend is the one of torch's own tests. DTensor finds the shape of
    a result by running the operator on fake tensors of the whole shape; active dispatch modes do not see these. torch
    also replaces `sys.excepthook`, and DTensor caches meshes whose groups no longer exist afterwards; both are undone.
    Raises `AssertionError` if torch.distributed is initialized already.
    """
    from torch.distributed.pipelining import schedules
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
        stack.enter_context(patch.object(schedules, "_batch_p2p", _InFlight.all_of))
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
        stack.callback(_clear_sharding_prop_cache)
        stack.callback(dist.destroy_process_group)
        yield


class _InFlight:
    """Tensors that a fake process group sends or receives: held until they are waited for, as NCCL does."""

    def __init__(self, operations: list[dist.P2POp]) -> None:
        self._tensors = [operation.tensor for operation in operations]
        for operation in operations:
            operation.op(operation.tensor, operation.peer, operation.group)

    @classmethod
    def all_of(cls, operations: list[dist.P2POp], desc: str | None = None) -> list["_InFlight"]:
        """Replace the function by which a schedule sends and receives."""
        return [cls(operations)] if operations else []

    def wait(self) -> None:
        self._tensors = []


@contextmanager
def shapes_are_given() -> Iterator[None]:
    """Within the `with` block, let the stages of a pipeline trust the shapes that they were given.

    Else torch lets its ranks vote, in each new schedule, on whether all of them were: a message to and fro. Versions
    before that vote trust what they are given.
    """
    from torch.distributed.pipelining import _utils, schedules

    def settle(schedule: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    votes = hasattr(schedules._PipelineSchedule, "_warmup_p2p")
    with patch.object(schedules._PipelineSchedule, "_warmup_p2p", settle) if votes else nullcontext():
        yield


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group that functional collectives know by `name`."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(name))


def apply_function(function: Any, *args: Any) -> Any:
    """Return `function.apply(*args)` of a `torch.autograd.Function`, without the search for functorch's wrappers.

    The search takes a third of the call; nothing runs under functorch's transforms here.
    """
    return super(torch.autograd.Function, function).apply(*args)


def is_observed(tensor: Tensor) -> bool:
    """Return whether a dispatch mode, profiler or tensor subclass must see the operators that run on a tensor."""
    return type(tensor) not in _PLAIN or _modes() > 0 or _is_profiled()


_PLAIN, _modes, _is_profiled = (
    (Tensor, nn.Parameter),
    torch._C._len_torch_dispatch_stack,
    torch.autograd._profiler_enabled,
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
