"""Measured steps with random weights, for comparison with a prediction."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moetune.adapt.build import build
from moetune.experts.context import read_received, read_rows
from moetune.memory.routing import Replayed
from moetune.memory.trace import Steps, Trace, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run import validation
from moetune.run.resolve import ResolvedRun, raise_problems
from moetune.training.step.batch import Batch


@dataclass(frozen=True)
class Measured:
    """Memory of real steps, in bytes.

    Attributes:
        tokens_per_second: of all steps but the first, which loads kernels and makes the optimizer's states, where there
            are more.
        trace: on a CPU every storage, as in a prediction; None on CUDA, where counters are read instead.
        peak_reserved, peak_process: None on a CPU, which has no caching allocator. `peak_process` is what the driver
            says is in use on the card at the end, by this process if it has the card to itself.
        routing: what each layer's experts received, call by call; its `load` is that of the micro-step in
            which one of them received most.
        received: what received from other ranks, call by call.
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
        """The rows of each expert, call by call."""
        return [list(rows) for rows in self.routing.calls]

    @property
    def host_bytes(self) -> int | None:
        """Peak of host memory used by design; None on CUDA, which has no counter of it."""
        return None if self.trace is None else self.trace.host_peak


def measure(run: ResolvedRun, device: torch.device | str, steps: int, ranks: Ranks = SINGLE_RANK) -> Measured:
    """Take real steps on `device` with random weights and random tokens.

    Args:
        ranks: of a run of several, all of which measure.

    Raises:
        UserError: as `build`.
    """
    raise_problems(
        (*validation.unpredictable_settings(run.config), *validation.missing_packages(run.config, run.device_type))
    )
    device = torch.device(device)
    config = run.config
    adapted = build(run.with_random_weights(), device, ranks=ranks)
    adapted.model.train()

    make = batches_of(adapted, device=device)
    on_cuda = device.type == "cuda"

    def now() -> float:
        if on_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began: list[float] = []  # when each step did

    def batch(rows: int) -> Batch:
        if len(began) == tracker.step:
            began.append(now())
        return make(rows)

    running = Steps(adapted, batch)
    tracker = Tracker(running.named)
    counts: list[list[int]] = []
    received: list[list[list[int]]] = []
    load: dict[int, list[int]] = {}

    def recorded(layer: int, ids: Tensor, num_experts: int) -> list[int]:
        rows = read_rows(layer, ids, num_experts)
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
        ended = now()
    fullest = tuple((layer, tuple(map(float, rows))) for layer, rows in sorted(load.items()))
    routing = Replayed("measured", None, fullest, steps, tuple(map(tuple, counts)))
    timed = max(1, steps - 1)
    tokens = timed * config.train.accumulate * config.train.micro_batch * config.train.sequence_length
    free, total = torch.cuda.mem_get_info(device) if on_cuda else (0, 0)
    return Measured(
        peak_allocated=torch.cuda.max_memory_allocated(device) if on_cuda else trace.parts(trace.peak).total,
        peak_reserved=torch.cuda.max_memory_reserved(device) if on_cuda else None,
        peak_process=total - free if on_cuda else None,
        tokens_per_second=tokens / (ended - began[steps - timed]),
        routing=routing,
        received=received,
        trace=None if on_cuda else trace,
    )
