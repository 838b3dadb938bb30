"""What stays in host memory, and its way to the device and back.

Host memory is pinned for a GPU, so that a copy runs beside the computation: on a stream of its own, ordered by events,
never waited for on the host. A copy's memory is taken from, and given back to, the stream that computes with it. On a
CPU, and on fake tensors, the same happens without streams: a "host" tensor is then a marked one, so that whoever counts
memory counts it apart.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetune.errors import UserError

_LARGE = 1 << 20  # bytes; torch's own pinned memory comes in powers of two, which matters from here on


# --- Which tensors stay on the host -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """What a tensor is allocated for: to stay on the host, or as a copy on the device of `source`, which does."""

    source: Tensor | None = None


_moving: ContextVar[Move | None] = ContextVar("moving", default=None)


def moving() -> Move | None:
    """The move that what is being allocated now belongs to."""
    return _moving.get()


@contextmanager
def allocating_on_host() -> Iterator[None]:
    """Inside, what is allocated is the host's by design: an update that runs there, say."""
    with _for(Move()):
        yield


@contextmanager
def _for(move: Move) -> Iterator[None]:
    token = _moving.set(move)
    try:
        yield
    finally:
        _moving.reset(token)


def stays_on_host(tensor: Tensor) -> bool:
    """Whether a tensor's memory is the host's by design."""
    return not tensor.is_meta and getattr(tensor.untyped_storage(), "stays_on_host", False)


def mark_on_host(tensor: Tensor) -> Tensor:
    """Says that this tensor's memory is the host's by design."""
    tensor.untyped_storage().stays_on_host = True
    return tensor


def empty_on_host(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the host for a long time, pinned if `device` is a GPU; on meta none.

    Raises:
        UserError: the system does not let so much be pinned.
    """
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    with _for(Move()):
        nbytes = torch.Size(size).numel() * dtype.itemsize
        if device.type == "cuda" and nbytes >= _LARGE:
            return mark_on_host(_pinned_in_place(nbytes).view(dtype).view(tuple(size)))
        return mark_on_host(torch.empty(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda"))


def _pinned_in_place(nbytes: int) -> Tensor:
    """Bytes on pages of their own, pinned as they are."""
    tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    cudart, address = torch.cuda.cudart(), tensor.data_ptr()
    if (code := int(cudart.cudaHostRegister(address, nbytes, 0))) != 0:
        raise UserError(
            f"{nbytes:,} bytes of host memory cannot be pinned (CUDA error {code}); "
            "free some, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(tensor.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
    return tensor


# --- Copies -------------------------------------------------------------------------------------------------------


class Arrival:
    """Copies under way. They may be used after `wait`, and only on the stream that waited."""

    def __init__(self, copies: tuple[Tensor, ...], device: torch.device, event: torch.cuda.Event | None) -> None:
        self.copies, self._device, self._event = copies, device, event
        self._done = event

    def read(self) -> tuple[Tensor, ...]:
        """The copies, once they are there: the host waits."""
        if self._done is not None:
            self._done.synchronize()
        return self.copies

    def wait(self) -> tuple[Tensor, ...]:
        """Lets the current stream, not the host, wait for the copies."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        return self.copies

    def __del__(self) -> None:
        self.wait()  # or the memory of copies that nobody wanted would serve others while they still arrive


class Lane:
    """One direction between host and `device`: copies run one after the other, beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None  # made with the first copy

    def to_device(self, tensors: Iterable[Tensor]) -> Arrival:
        """Copies of host tensors."""
        sources, copies = tuple(tensors), []
        for source in sources:
            with _for(Move(source)):
                copies.append(torch.empty(source.shape, dtype=source.dtype, device=self.device))
        return self._copy(sources, tuple(copies))

    def to_host(self, tensor: Tensor) -> Arrival:
        """A copy on the host. The tensor must stay until the arrival was waited for."""
        with _for(Move()):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return self._copy((tensor,), (mark_on_host(copy),))

    def copy(self, source: Tensor, target: Tensor) -> Arrival:
        """Copies into a tensor that is there already. Both must stay until the arrival was waited for."""
        return self._copy((source,), (target,))

    @torch.no_grad()
    def _copy(self, sources: tuple[Tensor, ...], copies: tuple[Tensor, ...]) -> Arrival:
        if self.device.type != "cuda":
            for source, copy in zip(sources, copies, strict=True):
                copy.copy_(source)
            return Arrival(copies, self.device, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for source, copy in zip(sources, copies, strict=True):
                copy.copy_(source, non_blocking=True)
        return Arrival(copies, self.device, self._stream.record_event())


# --- One layer ahead ----------------------------------------------------------------------------------------------


class Shuttle:
    """Brings the buffers of one layer at a time to the device, and those of the next layer ahead of time.

    In forward the next is the following layer; in backward it is the layer before, of those that gradients reach. At
    most two layers are on the device, and none between steps.

    Args:
        layers: in the order in which forward uses them, the modules whose buffers stay on the host.
        device: where they are needed.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Module]], device: torch.device) -> None:
        self._layers = [tuple(layer) for layer in layers]
        self._number = {module: number for number, layer in enumerate(self._layers) for module in layer}
        self._lane = Lane(device)
        self._here: dict[int, Arrival] = {}
        self._at: tuple[int, bool] | None = None  # the layer in use, and whether in backward
        self._backward_of: list[int] = []  # layers whose backward is still to come
        self._graph_task = -1

    def bring(self, module: nn.Module) -> Mapping[str, Tensor]:
        """The buffers of one of the modules, on the device until another layer's are asked for."""
        number, in_backward = self._number[module], torch._C._current_graph_task_id() != -1
        if self._at != (number, in_backward):
            self._turn_to(number, in_backward)
        copies = iter(self._here[number].copies)
        return {name: copy for (owner, name), copy in zip(self._names(number), copies, strict=True) if owner is module}

    def used(self, module: nn.Module, *, again: bool) -> None:
        """Says that forward is through with a layer, and whether backward will come to it."""
        number = self._number[module]
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation: backward is here already
        if not again:
            self._let_go(number)
            return
        if self._backward_of and self._backward_of[-1] >= number:
            self._backward_of.clear()  # of a forward pass that no backward pass followed
        self._backward_of.append(number)

    def let_go(self) -> None:
        """Nothing is left on the device."""
        for number in list(self._here):
            self._let_go(number)

    def _turn_to(self, number: int, in_backward: bool) -> None:
        self._at = number, in_backward
        following = number + 1 if number + 1 < len(self._layers) else None
        if in_backward:
            if number in self._backward_of:
                del self._backward_of[self._backward_of.index(number) :]
            following = self._backward_of[-1] if self._backward_of else None
            if self._graph_task != (task := torch._C._current_graph_task_id()):
                self._graph_task = task
                torch.autograd.Variable._execution_engine.queue_callback(self.let_go)
        for other in [one for one in self._here if one not in (number, following)]:
            self._let_go(other)  # before memory is taken: of these there are never three
        for one in (number, following):
            if one is not None and one not in self._here:
                self._here[one] = self._lane.to_device(module._buffers[name] for module, name in self._names(one))
        self._here[number].wait()

    def _let_go(self, number: int) -> None:
        self._here.pop(number, None)
        if self._at is not None and self._at[0] == number:
            self._at = None

    def _names(self, number: int) -> list[tuple[nn.Module, str]]:
        return [(module, name) for module in self._layers[number] for name in module._buffers]
