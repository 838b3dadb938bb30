"""Quantized experts and optimizer states on the host; asynchronous copies.

On a GPU, host memory is pinned, and copies run in parallel with the computation on a stream of their own, ordered by
events without blocking the host. Device memory of a copy is allocated and freed on the computing stream. On a CPU and
on fake tensors the same code runs without streams. Storages of host tensors and of their copies carry an attribute
each, so that a memory tracker can count them separately.
"""

import mmap
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moetune.compat.torch import NO_PASS, after_backward, backward_pass
from moetune.errors import UserError

_OWN_PAGES = 1 << 20  # bytes from which pinned memory is not taken from torch

# --- Tensors that stay on the host --------------------------------------------------------------------------------


def stays_on_host(tensor: Tensor) -> bool:
    """Return whether `mark_on_host` has marked the tensor's storage as host memory."""
    return getattr(tensor.untyped_storage(), "stays_on_host", False)


def mark_on_host(tensor: Tensor) -> Tensor:
    """Mark the tensor's storage as memory that stays on the host, for memory trackers; return the tensor."""
    tensor.untyped_storage().stays_on_host = True  # type: ignore[attr-defined]
    return tensor


def host_source(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the host storage that `CopyStream.to_device` copied to this tensor; None if none was, or it was freed."""
    source = getattr(tensor.untyped_storage(), "host_source", None)
    return None if source is None else source()


def empty_on_host(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor in host memory, marked as such (`stays_on_host`).

    The memory is pinned if `device` is a GPU. If `device` is meta, the result is a meta tensor without memory or mark.

    Raises:
        UserError: the system cannot pin that many bytes.
    """
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    if device.type == "cuda":
        return mark_on_host(_pinned(torch.Size(size).numel() * dtype.itemsize).view(dtype).view(tuple(size)))
    return mark_on_host(torch.empty(size, dtype=dtype, device="cpu"))


def copy_on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, marked as such (`stays_on_host`)."""
    return empty_on_host(tensor.shape, tensor.dtype, torch.device("cpu")).copy_(tensor)


def _pinned(nbytes: int) -> Tensor:
    """Return uninitialized pinned memory [nbytes], uint8; raises `UserError` if CUDA cannot pin it.

    From `_OWN_PAGES` bytes on, pages are mapped and pinned here: torch rounds pinned memory up to a power of two.
    """
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
    """Return a copy of a host tensor on `device`, in new memory even if that is a CPU."""
    return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value)


# --- Copies -------------------------------------------------------------------------------------------------------


class AsyncCopy:
    """Tensors (`copies`) that a `CopyStream` is filling.

    Before a device reads them, call `wait` on the stream that will; before the host does, call `read`. Both return
    them.
    """

    def __init__(self, copies: tuple[Tensor, ...], device: torch.device, event: torch.cuda.Event | None) -> None:
        self.copies, self._device, self._event = copies, device, event
        self._done = event

    def read(self) -> tuple[Tensor, ...]:
        """Block the host until the copies are complete, and return them."""
        if self._done is not None:
            self._done.synchronize()
        return self.copies

    def wait(self) -> tuple[Tensor, ...]:
        """Make the current CUDA stream wait for the copies, without blocking the host, and return them."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        return self.copies

    def __del__(self) -> None:
        self.wait()  # otherwise memory of unused copies could be reused while they are still being written


class CopyStream:
    """Copies in one direction between host and `device`, one after another, in parallel with the computation.

    On a device other than CUDA, copies are made at once, in CPU memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None  # created at the first copy

    def to_device(self, tensors: Iterable[Tensor]) -> AsyncCopy:
        """Start copying host tensors into new tensors on the device; `host_source` finds the original of each."""
        sources, copies = tuple(tensors), []
        for source in sources:
            copies.append(torch.empty(source.shape, dtype=source.dtype, device=self.device))
            copies[-1].untyped_storage().host_source = weakref.ref(source.untyped_storage())  # type: ignore[attr-defined]
        return self._copy(sources, tuple(copies))

    def to_host(self, tensor: Tensor) -> AsyncCopy:
        """Start copying a tensor to new host memory, pinned on a GPU.

        The caller keeps `tensor` alive until it has waited for the copy.
        """
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return self._copy((tensor,), (mark_on_host(copy),))

    def copy(self, source: Tensor, target: Tensor) -> AsyncCopy:
        """Start copying `source` into `target`, one on the host and the other on the device.

        The caller keeps both alive until it has waited for the copy.
        """
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
    """Copies the experts' buffers from host memory to `device`, one layer in advance.

    A layer is a decoder layer, known by its index (`number`). While one computes, the next is copied: in forward the
    registered layer with the next larger number, in backward the preceding one that gradients have reached before. At
    most two layers are on the device at a time, and none between steps.

    Attributes:
        carried: numbers of layers that besides stay from a backward pass to the next forward pass; may be changed.
    """

    def __init__(self, device: torch.device, carried: Collection[int] = ()) -> None:
        self.carried = carried
        self._layers: dict[int, tuple[nn.Module, ...]] = {}  # in the order of forward
        self._number: dict[nn.Module, int] = {}
        self._copies = CopyStream(device)
        self._on_device: dict[int, AsyncCopy] = {}
        self._at: tuple[int, bool] | None = None  # (number of the layer in use, whether in backward)
        self._reached: set[int] = set()  # layers whose output has required a gradient
        self._is_shared = False

    def add_layer(self, number: int, modules: Sequence[nn.Module]) -> None:
        """Register the modules of decoder layer `number`, whose buffers `bring` copies to the device.

        The buffers must be in host memory (`empty_on_host`), and stay there. Layers may be registered in any order, but
        forward must use them in ascending order of `number`. A second call for a layer replaces its modules.
        """
        self._layers = dict(sorted({**self._layers, number: tuple(modules)}.items()))
        self._number |= dict.fromkeys(modules, number)

    def bring(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Return the buffers of a registered module on the device, by name, and start copying the next layer.

        The tensors are valid until `bring` is called for another layer.
        """
        number, in_backward = self._number[module], backward_pass() != NO_PASS
        if self._at != (number, in_backward) or number not in self._on_device:
            self._go_to(number, in_backward)
        copies = iter(self._on_device[number].copies)
        return {name: copy for (owner, name), copy in zip(self._names(number), copies, strict=True) if owner is module}

    def used(self, number: int, *, again: bool) -> None:
        """Report that a forward pass of layer `number` is done.

        `again` says whether a backward pass will need the layer; if not, its copies on the device are freed.
        """
        if again:
            self._reached.add(number)
        elif not self._is_shared:
            self._on_device.pop(number, None)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within the `with` block, for forward passes, several micro-batches use a layer before any uses the next: its
        copies stay until then. Afterwards only those remain that backward needs."""
        self._is_shared = True
        try:
            yield
        finally:
            self._is_shared = False
            self.free(self._reached)

    def free(self, but: Collection[int | None] = ()) -> None:
        """Free the copies on the device, but those of some layers."""
        for number in self._on_device.keys() - {*but}:
            del self._on_device[number]

    def _go_to(self, number: int, in_backward: bool) -> None:
        """Make layer `number` current: free layers that are no longer needed, and copy this one and the next."""
        following = next((later for later in self._layers if later > number), None)
        if in_backward:
            following = max((before for before in self._reached if before < number), default=None)
            after_backward(lambda: self.free(but=self.carried))
        carried = (layer for layer in self.carried if in_backward or layer > number)
        self.free({number, following, *carried})  # before memory is allocated, so that there are never three layers
        for layer in (number, following):
            if layer is not None and layer not in self._on_device:
                buffers = (module.get_buffer(name) for module, name in self._names(layer))
                self._on_device[layer] = self._copies.to_device(buffers)
        self._on_device[number].wait()
        self._at = number, in_backward  # not before: memory may have run out while it was copied

    def _names(self, number: int) -> list[tuple[nn.Module, str]]:
        """Return (module, buffer name) of each buffer of a layer, in the order in which they are copied."""
        return [(module, name) for module in self._layers[number] for name, _ in module.named_buffers(recurse=False)]
