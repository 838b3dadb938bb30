"""`unread`: a checkpoint's tensors without values; `report_of`: memory of commands that only move tensors.

`quantize` and `export` run no step: they read tensors, convert them, and write them. Here their own code runs on fake
tensors, which `unread` gives them in place of a file's. On a GPU, a tensor is first read into host memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from moetune.config.schema import HardwareConfig, ParallelConfig
from moetune.experts.host import mark_on_host
from moetune.formats.base import Quantized
from moetune.memory.about import version
from moetune.memory.allocator import allocator_here
from moetune.memory.host import host_of
from moetune.memory.rank_memory import rank_memory
from moetune.memory.report import GpuMemory, LoadPeaks, MemoryReport, RankMemory
from moetune.memory.trace import Trace
from moetune.memory.trace.tracker import Tracker
from moetune.memory.unknowns import of_context
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.tensor_files import Stored

COPIED = 8 << 20
"""Bytes of two blocks of a file that is copied, or whose digest is computed (hub/fingerprint.py)."""


@dataclass(frozen=True)
class Reading:
    """Where fake tensors that stand for a file's are put: on a device or in host memory.

    Attributes:
        tracker: records them.
        device: the object that the command's code passes as its device. It is compared by identity, because fake
            tensors of a GPU are on the CPU, too.
        has_gpu: whether the device is a GPU; otherwise host memory is the device's own.
    """

    tracker: Tracker
    device: torch.device
    has_gpu: bool

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor as host memory: itself, if it is there, else a copy."""
        if not self.has_gpu or self.tracker.is_host(tensor):
            return tensor.contiguous()
        return self.host(torch.empty(tensor.shape, dtype=tensor.dtype))

    def host(self, tensor: Tensor) -> Tensor:
        """Record a new tensor as host memory, if the device is a GPU, and return it."""
        if self.has_gpu:
            self.tracker.read_marks(mark_on_host(tensor))
        return tensor


@dataclass(frozen=True)
class Unread(Stored):
    """A tensor of a file whose rows are read as fake tensors.

    Attributes:
        reading: where they are put.
        at_once: whether they go to the device as soon as they are read, whatever device is asked for: parts of a
            weight that is stored quantized.
    """

    reading: Reading = field(kw_only=True)
    at_once: bool = field(default=False, kw_only=True)

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the rows [start, stop) without values, [stop - start, ...]; None for `stop` is the end. They are put
        on the device if `at_once`, or if `device` is the object `reading.device`, else in host memory."""
        shape = ((self.num_rows if stop is None else stop) - start, *self.row_shape)
        rows = self.reading.host(torch.empty(shape, dtype=self.torch_dtype))
        goes = self.reading.has_gpu and (self.at_once or device is self.reading.device)
        return torch.empty(shape, dtype=self.torch_dtype) if goes else rows


def unread(tensors: Mapping[str, Stored], reading: Reading) -> dict[str, Stored]:
    """Return name -> the stored tensor of a checkpoint, which is read as a fake tensor and recorded by `reading`."""

    def as_unread(stored: Stored, *, at_once: bool = False) -> Stored:
        if isinstance(stored, Quantized):
            return replace(stored, parts={name: as_unread(part, at_once=True) for name, part in stored.parts.items()})
        return Unread(stored.file, stored.dtype, stored.shape, stored.offset, reading=reading, at_once=at_once)

    return {name: as_unread(stored) for name, stored in tensors.items()}


def described(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Stored]:
    """Return name -> the stored tensor of a checkpoint with these tensors, for one that is not on this machine.

    Floats have `dtype`, in safetensors' spelling such as `BF16`; all other tensors are int64.
    """
    file = Path("model.safetensors")
    return {
        name: Stored(file, dtype if tensor.is_floating_point() else "I64", tuple(tensor.shape), 0)
        for name, tensor in tensors.items()
    }


def report_of(tracker: Tracker, model: str, about: Mapping[str, str], card: Gpu | str | None) -> MemoryReport:
    """Stop a tracker and return the report of the command whose tensors it recorded; on a CPU (`card` None) of the host
    alone. `model` is its name, and `about` label -> text for the head of the report."""
    tracker.enter("load", "end")
    tracker.stop()
    traced = Trace.of(tracker.log, lambda message: "")
    lines = (*about.items(), ("moetune", version()))
    parts = traced.parts()
    if card is None:
        rank = RankMemory(0, parts, 0, parts.total)
        host = host_of(HardwareConfig(), None, max(parts.total, COPIED), 0)
        load = LoadPeaks(parts.total, 0)
        return MemoryReport(model, None, (rank,), (), load, about=lines, host=host, device="cpu")
    gpu = card if isinstance(card, Gpu) else find_gpu(card)
    rank = rank_memory(traced, gpu, ParallelConfig(), allocator_here("expandable"))
    return MemoryReport(
        model,
        GpuMemory(card if isinstance(card, str) else gpu.full_name, gpu.memory.value),
        (replace(rank, host_bytes=0),),
        gpu.assumptions,
        LoadPeaks(traced.host_peak, 0),
        about=lines,
        unknowns=(of_context(gpu),),
        host=host_of(HardwareConfig(), gpu, max(traced.host_peak, COPIED), 0),
    )
