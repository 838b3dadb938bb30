"""`HostMemory`: what a run or command takes of host memory, and how much there is.

Counted is what nothing else can have at the same time: pages of the interpreter and its libraries, and tensors, pinned
or not. The system's file cache does not count: it is given back when memory is needed. docs/concepts/offload.md
has the figures and how they were measured.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moetune.config.memory_size import parse_size
from moetune.config.schema import HardwareConfig
from moetune.memory.unknowns import Span
from moetune.models.catalog.gpus import Figure, Gpu

ON_CUDA = Figure(
    900 << 20,
    "a training process of a CUDA build of torch 2.11 on the null device (tests/nullcuda), of a toy: 894 MiB; a driver "
    "and its kernels may add a GiB (github.com/pytorch/pytorch/issues/12873 has 1.8 GiB in all)",
    measured_here=True,
    most=(900 << 20) + (1 << 30),
)
"""Host memory, in bytes, of a process that trains on a GPU, before its tensors; used if that GPU is not at hand."""
FIRST_USE = 40 << 20
"""Bytes that a process grows by after its imports, beside its tensors: pages of libraries that are used first then,
batches, the tokenizer, memory that malloc does not return. Measured for toys: 15 to 60 MiB."""
_LIMITS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder, limit and use of a container's memory, of both versions of control groups."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of one machine that a run or command takes at its peak, in bytes.

    Attributes:
        process: what one process takes before its tensors: interpreter, torch, other libraries.
        driver: what a GPU's driver and kernels may add to `process`.
        tensors: the most bytes of tensors that are in host memory at once in a process; on a CPU, of all tensors.
        pinned: the most of them that are pinned.
        processes: how many there are on the machine: the ranks.
        room: how much memory there is, and where the number is from; None if that is not known.
    """

    process: int
    driver: int
    tensors: int
    pinned: int = 0
    processes: int = 1
    room: Figure | None = None

    @property
    def required(self) -> int:
        """Bytes that all processes are expected to take."""
        return self.processes * (self.process + self.tensors)

    @property
    def span(self) -> Span:
        """The least and the most that all processes may take, around `required`."""
        return Span(self.required, self.required, self.required + self.processes * self.driver)

    @property
    def left(self) -> int | None:
        """Bytes that are expected to be left, negative if there are too few; None if it is not known how many there
        are."""
        return None if self.room is None else self.room.value - self.required

    @property
    def surely_left(self) -> int | None:
        """Bytes that are left if the processes take the most that they may, negative if there are too few; None if it
        is not known how many there are."""
        return None if self.room is None else self.room.value - self.span.high

    def to_json(self) -> dict[str, Any]:
        """Return the object under `host` in the output of `moetune predict --json`."""
        return {
            "required_bytes": self.required,
            "required_range": self.span.to_json(),
            "available_bytes": None if self.room is None else self.room.value,
            "available": None if self.room is None else self.room.source,
            "headroom_bytes": self.left,
            "processes": self.processes,
            "process_bytes": self.process,
            "tensor_bytes": self.tensors,
            "pinned_bytes": self.pinned,
        }


def host_of(hardware: HardwareConfig, card: Gpu | None, tensors: int, pinned: int, processes: int = 1) -> HostMemory:
    """Return the host memory that a run takes and has.

    It has what `hardware.host_memory` says; else `card.host`, which is known for a GPU of this machine; or on a CPU
    what is free on this machine. If none is known, `room` is None, and a process is taken to need `ON_CUDA`.

    Args:
        card: the GPU of the run; None for a CPU.
        tensors, pinned: most bytes of tensors, and of pinned ones, in the host memory of one process.
        processes: number of the run's processes on the machine.
    """
    available = this_machine() if card is None else card.host
    is_here = available is not None or card is None
    if hardware.host_memory is not None:
        available = Figure(parse_size(hardware.host_memory) or 0, "hardware.host_memory")
    process = process_here() if is_here else ON_CUDA.value
    driver = 0 if card is None else (ON_CUDA.most or 0) - ON_CUDA.value
    return HostMemory(process, driver, tensors, pinned, processes, available)


@cache
def process_here() -> int:
    """Return the resident bytes of this process plus `FIRST_USE`; the value of `ON_CUDA` if the system has no figure.

    The first result is cached, so the first call should come before the process allocates tensors.
    """
    resident = _numbers(Path("/proc/self/status")).get("VmRSS")
    return ON_CUDA.value if resident is None else resident + FIRST_USE


def this_machine() -> Figure | None:
    """Return the bytes of host memory that are free to new processes now, on this machine or in its container,
    whichever has less; None if the system has no figure."""
    free = _numbers(Path("/proc/meminfo")).get("MemAvailable")
    if free is None:
        return None
    limits = [Figure(free, "free on this machine now", measured_here=True)]
    for folder, most, used in _LIMITS:
        with suppress(OSError, ValueError):
            cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cache_bytes = int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))
            left = int((folder / most).read_text()) - int((folder / used).read_text()) + cache_bytes
            limits.append(Figure(max(left, 0), "free in this container now", measured_here=True))
    return min(limits, key=lambda limit: limit.value)


def _numbers(file: Path) -> dict[str, int]:
    """Return name -> bytes of the lines `name: number kB` of a file of /proc; empty if it cannot be read."""
    with suppress(OSError):
        lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
    return {}
