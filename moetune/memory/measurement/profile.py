"""Profile of one real training step: seconds, FLOP/s and bytes/s by part, beside measured limits of the device."""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.adapt.build import build
from moetune.errors import UserError, one_line
from moetune.files import write_output
from moetune.memory.time.bench import seconds_of
from moetune.memory.time.counter import Counter, work_parts
from moetune.memory.time.work import Work, is_product, sums
from moetune.memory.trace import Steps, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.run.resolve import ResolvedRun

_PREFIX = "part of a step: "
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class PartTime:
    """Time and work of one part of a step.

    Attributes:
        products: seconds of matrix products and attention on the device.
        passes: seconds of all other operations on the device.
        host: seconds that the host spent on the operations of this part; on a GPU these overlap with the device's.
        work: FLOPs, bytes and launches of the part, counted from its operations.
    """

    products: float
    passes: float
    host: float
    work: Work

    @property
    def seconds(self) -> float:
        """Seconds of all operations of the part on the device."""
        return self.products + self.passes

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s of matrix products and attention; None if the part has none."""
        return (self.work.flops + self.work.flops32) / self.products if self.products else None

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes/s of all operations except matrix products and attention; None if there are none."""
        return self.work.bytes / self.passes if self.passes else None


@dataclass(frozen=True)
class Profile:
    """Profile of one optimizer step.

    Attributes:
        dtype: the model's dtype, such as `bfloat16`.
        seconds: wall-clock time of the step, which profiling makes slower.
        tokens: tokens of the step.
        parts: part of the step (`WorkPart`) -> its time and work, longest first.
        launches: kernel launches that the profiler recorded; if it recorded none (on a CPU, or without permission to
            profile the GPU), launches counted from the operations.
        synchronizations: times that the host waited for the device; 0 on a CPU; None if the profiler may not access the
            GPU, in which case the parts' device times are missing too.
        gemm: FLOP/s of a large matrix product in the run's dtype, measured on this device.
        copy: bytes/s of a large copy on this device, bytes read plus bytes written.
    """

    device: str
    dtype: str
    seconds: float
    tokens: int
    parts: Mapping[str, PartTime]
    launches: int
    synchronizations: int | None
    gemm: float
    copy: float

    def to_json(self) -> dict[str, Any]:
        """Return the object under `profile` in the output of `moetune verify --json`."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "parts"}
        parts = {
            name: {
                "seconds": part.seconds,
                "products_seconds": part.products,
                "host_seconds": part.host,
                "flops_per_second": part.flops_per_second,
                "bytes_per_second": part.bytes_per_second,
                "work": part.work.to_json(),
            }
            for name, part in self.parts.items()
        }
        return plain | {"parts": parts}


class _Ranges(TorchDispatchMode):
    """Dispatch mode that counts the work of each operation and runs it in a range of torch's profiler, which is named
    `_PREFIX`, the part, and `/products` or `/passes`."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = "products" if is_product(func) else "passes"
        with record_function(f"{_PREFIX}{self.counter.part(func)}/{kind}"):
            out = func(*args, **kwargs)
        self.counter.count(func, args, kwargs, out)
        return out


def profile_step(run: ResolvedRun, device: torch.device, file: Path) -> Profile:
    """Take two steps with random weights, profile a third, and write the profiler's trace to `file`.

    It is JSON for chrome://tracing, compressed if the name ends in `.gz`. Raises `UserError` if the model cannot be
    built, or the file cannot be written.
    """
    adapted = build(run.with_random_weights(), device)
    adapted.model.train()
    config, on_cuda = run.config, device.type == "cuda"
    steps = Steps(adapted, batches_of(adapted, device=device))
    tracker = Tracker(steps.named)
    capability = torch.cuda.get_device_capability(device) if on_cuda else (0, 0)
    counter = Counter(capability, None, tracker, work_parts(adapted, steps.named), tracker.log.done)
    ranges = _Ranges(counter)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    wait: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if on_cuda else (lambda: None)
    for number in range(3):
        tracker.step = number
        last = number == 2
        recording = profile(activities=activities, acc_events=True) if last else nullcontext()
        wait()
        began = time.perf_counter()
        with recording, ranges if last else nullcontext():
            steps.one(tracker, config.train.accumulate)
            wait()
        seconds = time.perf_counter() - began
    steps.watch.remove()
    assert isinstance(recording, profile)
    with tempfile.TemporaryDirectory() as folder:  # torch's writer does not report all write errors
        trace = Path(folder) / file.name
        try:
            recording.export_chrome_trace(str(trace))
            content = trace.read_bytes()
        except (OSError, RuntimeError) as error:
            raise UserError(f"--profile {str(file)!r} cannot be written: {one_line(error)}") from None
    if file.suffix != ".gz" and not content.rstrip().endswith(b"}"):
        raise UserError(f"--profile {str(file)!r} cannot be written: there is no room in {tempfile.gettempdir()!r}")
    write_output(file, content)
    events = list(recording.events() or ())
    dtype = adapted.model.dtype
    launched = sum(event.name in _LAUNCHES for event in events)
    done = [one for one in tracker.log.done if one.step == 2]
    return Profile(
        device=torch.cuda.get_device_name(device) if on_cuda else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        seconds=seconds,
        tokens=config.train.accumulate * config.train.micro_batch * config.train.sequence_length,
        parts=_by_part(events, sums(done), on_cuda),
        launches=launched or round(sum(one.work.launches for one in done)),
        synchronizations=None if on_cuda and not launched else sum(event.name in _WAITS for event in events),
        gemm=large_product(device, dtype),
        copy=_copy(device),
    )


def _by_part(events: list[FunctionEvent], works: Mapping[Any, Work], on_cuda: bool) -> dict[str, PartTime]:
    """Sum the seconds of the ranges of `_Ranges` by part: on a GPU those of the kernels launched inside a range, on a
    CPU those of the range itself. Returns part -> time and work, longest first; `works` is part -> its work."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.name.startswith(_PREFIX) and event.device_type == torch.autograd.DeviceType.CPU:
            part, _, kind = event.name.removeprefix(_PREFIX).partition("/")
            found = seconds.setdefault((part, kind), [0.0, 0.0])
            found[0] += (event.device_time_total if on_cuda else event.cpu_time_total) / 1e6
            found[1] += event.cpu_time_total / 1e6
    none = [0.0, 0.0]
    parts = {}
    for part in dict.fromkeys([*(part for part, _ in seconds), *works]):
        products, passes = (seconds.get((part, kind), none) for kind in ("products", "passes"))
        parts[part] = PartTime(products[0], passes[0], products[1] + passes[1], works.get(part, Work()))
    return dict(sorted(parts.items(), key=lambda item: -item[1].seconds))


def large_product(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square matrix product in `dtype`: size 8192 on a GPU, 1024 on a CPU."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(device, lambda: torch.mm(a, b))


def _copy(device: torch.device) -> float:
    """Measure the bytes/s of a copy on the device, bytes read plus bytes written."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(device, lambda: target.copy_(source))
