"""What a device holds that ran out of memory: live storages, owners, other processes.

The storages are read from CUDA's caching allocator before it raises its error, because the operands of the failed
operation are freed while the error propagates.
"""

import gc
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.compat.torch import watch_out_of_memory
from moetune.memory.report import PartName
from moetune.memory.trace.watched import labels_of, tensors_of
from moetune.parallel.ranks import local_tensor
from moetune.training.optim.optimizers import CombinedOptimizer


class LiveStorage(NamedTuple):
    """A live storage. `made_by` describes it, empty if unknown: shape and dtype of a tensor that uses it."""

    bytes: int
    made_by: str


@dataclass(frozen=True)
class Refused:
    """State of a device when it refused an allocation.

    Attributes:
        wanted: bytes requested.
        allocated: bytes of all live tensors on the device.
        available: bytes that tensors of this process could have: what the allocator had reserved plus what was free on
            the GPU.
        storages: live storages by key: the address.
        key: returns the key of a tensor's storage; None if it has none.
    """

    wanted: int
    allocated: int
    available: int
    storages: dict[int, LiveStorage]
    key: Callable[[Tensor], int | None] = field(repr=False)

    @property
    def reached(self) -> int:
        """Bytes needed in all: allocated plus requested."""
        return self.allocated + self.wanted

    @property
    def lacking(self) -> int:
        """Bytes missing; the whole request if enough memory was free but fragmented."""
        over = self.reached - self.available
        return over if over > 0 else self.wanted


@cache
def watch_cuda() -> dict[int, Refused]:
    """Register an observer that records the state of a CUDA device whenever it refuses an allocation.

    Returns a dict, device index -> state at the last refused allocation, that the observer updates. All calls return
    the same dict and register one observer.
    """
    seen: dict[int, Refused] = {}

    def note(device: int, wanted: int, total: int, free: int) -> None:
        alive = {
            block["address"]: LiveStorage(block["size"], "")
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == device
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        for tensor in _tensors():
            key = _address(tensor)
            if key in alive and not alive[key].made_by:
                shape = " × ".join(map(str, tensor.shape))
                alive[key] = LiveStorage(alive[key].bytes, f"{shape} {str(tensor.dtype).removeprefix('torch.')}")
        seen[device] = Refused(wanted, allocated, reserved + free, alive, _address)

    watch_out_of_memory(note)
    return seen


def _tensors() -> Iterator[Tensor]:
    """Yield the CUDA tensors and parameters, without subclasses such as DTensor, that Python objects refer to."""
    return (tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter) and tensor.is_cuda)


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() or None


class Owned(NamedTuple):
    """A group of storages with one owner.

    Attributes:
        part: the part of the memory report to which they belong.
        name: the owner, such as a component of the model, `optimizer states`, or the operation of a temporary.
        storages: number of storages.
    """

    part: PartName
    name: str
    storages: int
    bytes: int


def owned(refused: Refused, adapted: Adapted | None, optimizer: CombinedOptimizer | None) -> list[Owned]:
    """Group the storages of a refused allocation by owner, largest group first.

    Storages that belong to neither the model nor the optimizer are reported as `transient_peak`, grouped by
    `LiveStorage.made_by`. `adapted` (the model, with its gradients) and `optimizer` are None if not built yet.
    """
    left, by_group = dict(refused.storages), defaultdict[tuple[PartName, str], list[int]](list)
    for tensor, part, name in _named(adapted, optimizer):
        key = refused.key(tensor)
        if key is not None and key in left:
            by_group[part, name].append(left.pop(key).bytes)
    for size, made_by in left.values():
        by_group["transient_peak", made_by or f"of {size:,} bytes"].append(size)
    groups = [Owned(part, name, len(sizes), sum(sizes)) for (part, name), sizes in by_group.items()]
    return sorted(groups, key=lambda group: -group.bytes)


def _named(adapted: Adapted | None, optimizer: CombinedOptimizer | None) -> Iterator[tuple[Tensor, PartName, str]]:
    """Yield (tensor, part, name) for the model's tensors, its gradients, master weights and optimizer states."""
    if adapted is None:
        return
    labels, trained = labels_of(adapted), adapted.trainable()
    of_trained = {id(local_tensor(parameter).untyped_storage()) for parameter in trained.values()}
    for tensor in chain(tensors_of(adapted.model), map(local_tensor, trained.values())):
        storage = id(tensor.untyped_storage())
        trains = storage in of_trained or tensor.requires_grad  # a gathered parameter has storage apart from its shards
        yield tensor, "trainable_weights" if trains else "frozen_weights", labels.get(storage, "other")
    for name, parameter in trained.items():
        if parameter.grad is not None:
            yield local_tensor(parameter.grad), "gradients", f"gradients: {adapted.part_of(name)}"
    if optimizer is not None:
        yield from ((tensor, "master_weights", "float32 copies") for tensor in optimizer.masters())
        yield from ((tensor, "optimizer_states", "optimizer states") for tensor in optimizer.states())


class Process(NamedTuple):
    """A process that uses `bytes` of a GPU's memory."""

    pid: int
    name: str
    bytes: int


def processes_on(device: torch.device) -> list[Process]:
    """Return the processes on a GPU, this one included, as listed by `nvidia-smi`; none if that is missing, fails, or
    sees no processes, as in most containers."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
    command = ["nvidia-smi", asked, "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    uuid, processes = str(torch.cuda.get_device_properties(device).uuid), []
    for line in listed.splitlines():
        card, pid, mebibytes, name = [*(field.strip() for field in line.split(",", 3)), "", "", ""][:4]
        if card.removeprefix("GPU-") == uuid and pid.isdecimal() and mebibytes.isdecimal():
            processes.append(Process(int(pid), name, int(mebibytes) << 20))
    return processes
