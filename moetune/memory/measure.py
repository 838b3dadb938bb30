"""The same steps for real, with random weights, on the machine at hand: what a prediction is compared with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moetune.adapt.build import build
from moetune.config import RunConfig, refuse_untraceable
from moetune.experts.mlp import count, counting_by
from moetune.memory.routing import Routing
from moetune.memory.trace import Steps, Trace, make_batch, vocabulary_of
from moetune.memory.tracker import Tracker
from moetune.parallel.exchange import arriving_by, read
from moetune.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Measured:
    """What real steps took, in bytes.

    Attributes:
        trace: on a CPU every storage, as in a prediction; None on CUDA, where counters are read instead.
        peak_reserved, peak_process: None on a CPU, which has no caching allocator. `peak_process` is what the driver
            says is in use on the card at the end, by this process if it has the card to itself.
        routing: what each layer's experts received in the micro-step in which one of them received most.
        counts: what `tokens_per_expert` answered, call by call.
        arrived: what arrived from other ranks, call by call.
    """

    peak_allocated: int
    peak_reserved: int | None
    peak_process: int | None
    tokens_per_second: float
    routing: Routing
    counts: list[list[int]]
    trace: Trace | None
    arrived: list[list[list[int]]] = field(default_factory=list)

    @property
    def host_bytes(self) -> int | None:
        """The most that was on the host by design; CUDA has no counter of it."""
        return None if self.trace is None else self.trace.host_peak


def measure(config: RunConfig, device: torch.device | str, steps: int, ranks: Ranks = ALONE) -> Measured:
    """Takes real steps on `device` with random weights and random tokens.

    Args:
        ranks: of a run of several, all of which measure.

    Raises:
        UserError: as `build`.
    """
    refuse_untraceable(config)
    device = torch.device(device)
    random = config.model_copy(update={"model": config.model.model_copy(update={"weights": "random"})})
    adapted = build(random, device, ranks=ranks)
    adapted.model.train()

    def batch(rows: int) -> dict[str, Tensor]:
        made = make_batch(config, vocabulary_of(adapted), rows)
        return {name: tensor.to(device) for name, tensor in made.items()}

    running = Steps(adapted, config, batch)
    tracker = Tracker(running.named)
    counts: list[list[int]] = []
    arrived: list[list[list[int]]] = []
    load: dict[int, list[int]] = {}

    def recorded(ids: Tensor, num_experts: int) -> list[int]:
        rows = count(ids, num_experts)
        counts.append(rows)
        layer = running.layer_of[tracker.module]
        load[layer] = max(load.get(layer, rows), rows, key=max)
        return rows

    def recorded_arrivals(arriving: Tensor, leaving: list[list[int]], rank: int) -> list[list[int]]:
        arrived.append(read(arriving, leaving, rank))
        return arrived[-1]

    on_cuda = device.type == "cuda"
    with counting_by(recorded), arriving_by(recorded_arrivals):
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        trace = running.run(tracker, config.train.accumulate, steps=steps, tracking=not on_cuda)
        if on_cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    routing = Routing("measured", None, tuple((layer, tuple(map(float, rows))) for layer, rows in sorted(load.items())))
    tokens = steps * config.train.accumulate * config.train.micro_batch * config.train.sequence_length
    free, total = torch.cuda.mem_get_info(device) if on_cuda else (0, 0)
    return Measured(
        peak_allocated=torch.cuda.max_memory_allocated(device) if on_cuda else trace.parts(trace.peak).total,
        peak_reserved=torch.cuda.max_memory_reserved(device) if on_cuda else None,
        peak_process=total - free if on_cuda else None,
        tokens_per_second=tokens / seconds,
        routing=routing,
        counts=counts,
        arrived=arrived,
        trace=None if on_cuda else trace,
    )
