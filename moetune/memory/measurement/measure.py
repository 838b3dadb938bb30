"""Real training steps with random weights: peak memory, speed and expert load."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moetune.adapt.build import build
from moetune.errors import UserError, raise_problems
from moetune.experts.context import ReadCounts, read_received
from moetune.memory.assumed_routing import Replayed
from moetune.memory.trace import Steps, Trace, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import find_gpu
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run import validation
from moetune.run.resolve import ResolvedRun
from moetune.training.step.batch import Batch


@dataclass(frozen=True)
class Measured:
    """Measurements of real steps; memory in bytes.

    Attributes:
        peak_allocated: peak of live tensors on the device.
        peak_reserved: peak of the caching allocator; None on a CPU.
        peak_process: GPU memory that all processes on the GPU use after the last step, as the driver reports; None on a
            CPU.
        tokens_per_second: over all steps but the first, which loads kernels and creates optimizer states; over the
            first if there is only one. An evaluation does not count.
        routing: the rows that each expert received in each call, for a prediction that replays them. Its `load` holds,
            for each layer, the rows of the call in which a single expert received most.
        trace: on a CPU the recorded storages, as in a prediction; None on CUDA, where torch's counters are read.
        received: under expert parallelism, the rows that this rank's experts received from each rank,
            [calls][ranks][experts of this rank].
    """

    peak_allocated: int
    peak_reserved: int | None
    peak_process: int | None
    tokens_per_second: float
    routing: Replayed
    trace: Trace | None
    received: list[list[list[int]]] = field(default_factory=list)

    @property
    def counts(self) -> list[list[int]]:
        """The rows that each expert received, [calls][experts]."""
        return [list(rows) for rows in self.routing.calls]

    @property
    def host_bytes(self) -> int | None:
        """Peak bytes of tensors that settings move to host memory; None on CUDA, where they are not counted."""
        return None if self.trace is None else self.trace.host_peak


def measure(run: ResolvedRun, device: torch.device | str, steps: int, ranks: Ranks = SINGLE_RANK) -> Measured:
    """Take real steps on `device` with random weights and random tokens, and measure them. Every rank must call it.

    Raises:
        UserError: no steps; the model cannot be built (`build`); or the run has settings that cannot be predicted or
            needs a package that is not installed.
    """
    config = run.config
    unpredicted, missing = (
        validation.unpredictable_settings(config),
        validation.missing_packages(config, run.device_type),
    )
    raise_problems([*unpredicted, *missing, *([] if steps > 0 else [f"{steps} steps: give 1 or more"])])
    device = torch.device(device)
    adapted = build(run.with_random_weights(), device, ranks=ranks)
    adapted.model.train()

    make = batches_of(adapted, device=device)
    on_cuda = device.type == "cuda"

    def now() -> float:
        if on_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began: list[float] = []  # start time of each step, and of what follows the last one, in seconds

    def batch(rows: int) -> Batch:
        if len(began) == tracker.step + (tracker.phase == "evaluation"):
            began.append(now())
        return make(rows)

    running = Steps(adapted, batch)
    tracker = Tracker(running.named)
    counts: list[list[int]] = []
    received: list[list[list[int]]] = []
    load: dict[int, list[int]] = {}

    def recorded(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        rows = read()
        counts.append(rows)
        load[layer] = max(load.get(layer, rows), rows, key=max)
        return rows

    def recorded_received(receive: Tensor, send: list[list[int]], rank: int) -> list[list[int]]:
        received.append(read_received(receive, send, rank))
        return received[-1]

    with adapted.expert_context.hooks.using(count_rows=recorded, count_received=recorded_received):
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        trace = running.run(tracker, config.train.accumulate, steps=steps, tracking=not on_cuda)
        began.append(now())
    fullest = tuple((layer, tuple(map(float, rows))) for layer, rows in sorted(load.items()))
    routing = Replayed("measured", None, fullest, steps=steps, calls=tuple(map(tuple, counts)))
    timed = max(1, steps - 1)
    tokens = timed * config.train.accumulate * config.train.micro_batch * config.train.sequence_length
    free, total = torch.cuda.mem_get_info(device) if on_cuda else (0, 0)
    return Measured(
        peak_allocated=torch.cuda.max_memory_allocated(device) if on_cuda else trace.parts(trace.peak).total,
        peak_reserved=torch.cuda.max_memory_reserved(device) if on_cuda else None,
        peak_process=total - free if on_cuda else None,
        tokens_per_second=tokens / (began[steps] - began[steps - timed]),
        routing=routing,
        received=received,
        trace=None if on_cuda else trace,
    )


def catalog_name(device: torch.device) -> str:
    """Return the GPU's catalog name; if it is not in the catalog, its memory as a size, such as `47608692736B`."""
    name = torch.cuda.get_device_name(device)
    try:
        return find_gpu(name).name
    except UserError:
        return f"{torch.cuda.get_device_properties(device).total_memory}B"
