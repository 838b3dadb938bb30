"""Tensors in host memory, and their copies on the device.

Host memory is pinned for a GPU, so that a copy runs beside the computation: on a stream of its own, ordered by events,
without the host waiting. A copy's memory is taken from, and returned to, the stream that computes with it. On a CPU and
on fake tensors the same happens without streams: the storages of host tensors, and of their copies on the device, are
marked, so that a memory tracker counts them apart.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moetune.compat.torch import NO_PASS, after_backward, backward_pass
from moetune.errors import UserError

_OWN_PAGES = 1 << 20  # bytes from which a tensor is pinned in pages of its own

# --- Which tensors stay on the host -------------------------------------------------------------------------------


def stays_on_host(tensor: Tensor) -> bool:
    """Whether a tensor's memory is the host's by design."""
    return getattr(tensor.untyped_storage(), "stays_on_host", False)


def mark_on_host(tensor: Tensor) -> Tensor:
    """Mark a tensor's memory as the host's by design."""
    tensor.untyped_storage().stays_on_host = True  # type: ignore[attr-defined]
    return tensor


def host_source(tensor: Tensor) -> torch.UntypedStorage | None:
    """The host's storage that this tensor's is a copy of; None if it is not one, or that one is gone."""
    source = getattr(tensor.untyped_storage(), "host_source", None)
    return None if source is None else source()


def empty_on_host(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return long-lived memory on the host, pinned if `device` is a GPU; none on meta.

    Raises:
        UserError: the system refuses to pin so much.
    """
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    if device.type == "cuda":
        return mark_on_host(_pinned(torch.Size(size).numel() * dtype.itemsize).view(dtype).view(tuple(size)))
    return mark_on_host(torch.empty(size, dtype=dtype, device="cpu"))


def _pinned(nbytes: int) -> Tensor:
    """Return pinned memory [nbytes], uint8. Torch's own comes in powers of two, which is too much for large tensors."""
    if nbytes < _OWN_PAGES:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    if (code := int(cudart.cudaHostRegister(address, nbytes, 0))) != 0:
        raise UserError(
            f"{nbytes:,} bytes of host memory cannot be pinned (CUDA error {code}); "
            "free some, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
    return tensor


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor that is not marked, such as a norm, to the device."""
    return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value)


# --- Copies -------------------------------------------------------------------------------------------------------


class AsyncCopy:
    """Copies under way. They may be used after `wait`, only on the stream that waited."""

    def __init__(self, copies: tuple[Tensor, ...], device: torch.device, event: torch.cuda.Event | None) -> None:
        self.copies, self._device, self._event = copies, device, event
        self._done = event

    def read(self) -> tuple[Tensor, ...]:
        """Let the host wait for the copies, and return them."""
        if self._done is not None:
            self._done.synchronize()
        return self.copies

    def wait(self) -> tuple[Tensor, ...]:
        """Let the current stream wait for the copies, and return them."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        return self.copies

    def __del__(self) -> None:
        self.wait()  # or the memory of unused copies would be reused while they still arrive


class CopyStream:
    """One direction between the host and `device`: copies run one after the other, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None  # made with the first copy

    def to_device(self, tensors: Iterable[Tensor]) -> AsyncCopy:
        """Copy host tensors, into memory that is marked as a copy of theirs."""
        sources, copies = tuple(tensors), []
        for source in sources:
            copies.append(torch.empty(source.shape, dtype=source.dtype, device=self.device))
            copies[-1].untyped_storage().host_source = weakref.ref(source.untyped_storage())  # type: ignore[attr-defined]
        return self._copy(sources, tuple(copies))

    def to_host(self, tensor: Tensor) -> AsyncCopy:
        """Copy a tensor to the host. It must stay until the copy was waited for."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return self._copy((tensor,), (mark_on_host(copy),))

    def copy(self, source: Tensor, target: Tensor) -> AsyncCopy:
        """Copy into an existing tensor. Both must stay until the copy was waited for."""
        return self._copy((source,), (target,))

    @torch.no_grad()
    def _copy(self, sources: tuple[Tensor, ...], copies: tuple[Tensor, ...]) -> AsyncCopy:
        if self.device.type != "cuda":
            for source, copy in zip(sources, copies, strict=True):
                copy.copy_(source)
            return AsyncCopy(copies, self.device, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for source, copy in zip(sources, copies, strict=True):
                copy.copy_(source, non_blocking=True)
        return AsyncCopy(copies, self.device, self._stream.record_event())


# --- One layer ahead ----------------------------------------------------------------------------------------------


class ExpertPrefetcher:
    """Copy the buffers of one layer at a time to the device, and those of the next layer in advance.

    The next is the following layer in forward, and in backward the preceding one of those that gradients reach. At most
    two layers are on the device, and none between steps.

    Args:
        device: where they are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._layers: dict[int, tuple[nn.Module, ...]] = {}  # in the order of forward
        self._number: dict[nn.Module, int] = {}
        self._copies = CopyStream(device)
        self._on_device: dict[int, AsyncCopy] = {}
        self._at: tuple[int, bool] | None = None  # the layer in use, and whether in backward
        self._backward_of: list[int] = []  # layers whose backward is still to come
        self._pass = NO_PASS

    def add_layer(self, number: int, modules: Sequence[nn.Module]) -> None:
        """Register modules whose buffers stay on the host. Forward uses layers in ascending order."""
        self._layers = dict(sorted({**self._layers, number: tuple(modules)}.items()))
        self._number |= dict.fromkeys(modules, number)

    def bring(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the buffers of a module on the device, valid until those of another layer are requested."""
        number, in_backward = self._number[module], backward_pass() != NO_PASS
        if self._at != (number, in_backward):
            self._go_to(number, in_backward)
        copies = iter(self._on_device[number].copies)
        return {name: copy for (owner, name), copy in zip(self._names(number), copies, strict=True) if owner is module}

    def used(self, module: nn.Module, *, again: bool) -> None:
        """Note that forward is through with a layer, and whether backward will come to it."""
        number = self._number[module]
        if backward_pass() != NO_PASS:
            return  # a recomputation: backward is here already
        if not again:
            self._free(number)
            return
        if self._backward_of and self._backward_of[-1] >= number:
            self._backward_of.clear()  # of a forward pass that no backward pass followed
        self._backward_of.append(number)

    def free(self) -> None:
        """Free all copies on the device."""
        for number in list(self._on_device):
            self._free(number)

    def _go_to(self, number: int, in_backward: bool) -> None:
        self._at = number, in_backward
        following = next((later for later in self._layers if later > number), None)
        if in_backward:
            if number in self._backward_of:
                del self._backward_of[self._backward_of.index(number) :]
            following = self._backward_of[-1] if self._backward_of else None
            if self._pass != backward_pass():
                self._pass = backward_pass()
                after_backward(self.free)
        for other in [one for one in self._on_device if one not in (number, following)]:
            self._free(other)  # before memory is taken: there are never three layers
        for one in (number, following):
            if one is not None and one not in self._on_device:
                self._on_device[one] = self._copies.to_device(
                    module.get_buffer(name) for module, name in self._names(one)
                )
        self._on_device[number].wait()

    def _free(self, number: int) -> None:
        self._on_device.pop(number, None)
        if self._at is not None and self._at[0] == number:
            self._at = None

    def _names(self, number: int) -> list[tuple[nn.Module, str]]:
        return [(module, name) for module in self._layers[number] for name, _ in module.named_buffers(recurse=False)]
