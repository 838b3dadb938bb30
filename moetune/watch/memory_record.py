"""Predicted beside measured, for every run: `memory.json`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from moetune.adapt.fake import tensors_of
from moetune.errors import one_line
from moetune.experts.context import read_rows
from moetune.memory.allocator import WORKSPACES
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.live import Refused, refused_by_tracker, watch_cuda
from moetune.memory.predict import time_of
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.trace import named_modules, trace
from moetune.memory.trace.tracker import Tracker
from moetune.memory.verify import catalog_name
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.resolve import ResolvedRun
from moetune.training.loop import Loop
from moetune.training.metrics import Pace
from moetune.training.optim.values import generator_states, set_generator_states

MEASURED_STEPS = 2
"""Optimizer states appear in the first step; the second is like all that follow."""


class MemoryRecord:
    """Measures the first steps: on a CPU with the tracker that a trace uses, on CUDA with torch's counters."""

    def __init__(self, loop: Loop, console: Console) -> None:
        self.loop, self.console, self.device = loop, console, loop.device
        self.card = find_gpu(catalog_name(self.device)) if self.device.type == "cuda" else None
        self.predicted = self._predict(BALANCED)
        self._as_routed: int | None = None
        self._tracker = Tracker(named_modules(loop.adapted))
        self._tracking = ExitStack()
        self._fullest: dict[int, list[int]] = {}  # by layer, the rows of the call in which an expert received most
        self._steps, self._rows = 0, 0
        self._measured: dict[str, int | None] | None = None
        self._seen = watch_cuda() if self.device.type == "cuda" else {}

    def _predict(self, routing: Routing) -> Predicted:
        """A prediction that cannot be made ends no training: it is noted. None changes what training draws: a trace
        builds a model, which begins from the seed."""
        drawn = generator_states(self.device)
        try:
            return predicted(self.loop.smaller_run(), self.loop.ranks, self.card, routing)
        except Exception as error:  # models have code of their own, which fails in its own ways
            self.console.print(
                f"memory of this run cannot be predicted ({one_line(error)}); it trains without",
                highlight=False,
                soft_wrap=True,
            )
            return Predicted()
        finally:
            set_generator_states(drawn, self.device)

    def step_begins(self) -> None:
        """Begins to measure; again where the step begins anew as one of another run file."""
        if self._measured is None and self._rows != self.loop.micro_batch:
            if self._rows:
                self._tracking.close()
                self.predicted = self._predict(BALANCED)
                self._tracker = Tracker(self._tracker.modules, self._tracker.limit)
                self._fullest, self._steps = {}, 0
            self._rows = self.loop.micro_batch
            self._begin()

    def refused(self) -> Refused | None:
        """Ends the measurement. What the device held when it last had no more to give; None if that is not known."""
        self._tracking.close()
        return self._seen.get(self.device.index or 0) or refused_by_tracker(self._tracker)

    def _begin(self) -> None:
        hooks = self.loop.adapted.expert_context.hooks
        self._tracking.enter_context(hooks.using(count_rows=self._count_rows))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        for tensor in tensors_of(self.loop.adapted.model):
            self._tracker.add(tensor)
        optimizer = self.loop.optimizer
        for tensor in (*optimizer.masters(), *optimizer.states()):  # states are there if the run was resumed
            self._tracker.add(tensor)
        self._tracking.enter_context(self._tracker)

    def _count_rows(self, layer: int, ids: Tensor, num_experts: int) -> list[int]:
        rows = read_rows(layer, ids, num_experts)
        self._fullest[layer] = max(self._fullest.get(layer, rows), rows, key=max)
        return rows

    def step_ends(self) -> None:
        self._steps += 1
        if self._steps == MEASURED_STEPS:
            self.finish()

    def finish(self) -> None:
        """Ends the measurement and writes what there is. Called again, it writes the tokens received since."""
        self._tracking.close()
        if not self._steps:
            return
        on_cuda = self.device.type == "cuda"
        if self._measured is None:
            self._measured = {
                "peak_allocated": torch.cuda.max_memory_allocated(self.device) if on_cuda else self._tracker.peak_bytes,
                "peak_reserved": torch.cuda.max_memory_reserved(self.device) if on_cuda else None,
            }
            load = tuple((layer, tuple(map(float, rows))) for layer, rows in sorted(self._fullest.items()))
            if self.predicted.peak is not None:
                self._as_routed = self._predict(Routing("measured", None, load) if load else BALANCED).peak
        self.loop.folder.write_memory(
            {
                "schema": 1,
                "device": torch.cuda.get_device_name(self.device) if on_cuda else "cpu",
                "steps": min(self._steps, MEASURED_STEPS),
                "predicted": {"peak_allocated": self.predicted.peak, "as_routed": self._as_routed},
                "measured": self._measured,
                "expert_load": {str(layer): load.tolist() for layer, load in self.loop.total_load.items()},
            }
        )


class Predicted(NamedTuple):
    """Bytes of the peak that this rank allocates, None if nobody knows; what a step computes."""

    peak: int | None = None
    pace: Pace = Pace()


def predicted(
    run: ResolvedRun, ranks: Ranks = SINGLE_RANK, card: Gpu | None = None, routing: Routing = BALANCED
) -> Predicted:
    """One prediction: by a trace on a card, where it counts operations too, and of recorded load, for which a closed
    form has a bound; else on a CPU by closed form, or by a trace if there is none. One of several ranks cannot record
    a step while it runs: it knows what was recorded before (`record_ahead`).

    Args:
        card: whose kernels run, and whose workspaces are allocated; None for the CPU's.
        routing: what the experts receive.
    """
    workspaces = 0 if card is None else WORKSPACES * card.cublas_workspace.value
    if not ranks.is_single or (card is None and not routing.load):
        try:
            found = ClosedForm(run, ranks.rank, card).at(run.config, routing, may_record=ranks.is_single)
            return Predicted(None if found is None else found.parts().total + workspaces)
        except Exception:
            if not ranks.is_single:
                raise
    traced = trace(run, routing, gpu=card)
    time = None if card is None else time_of(run.config, traced, card)
    pace = Pace() if time is None else Pace(round(time.flops), round(time.limit))
    return Predicted(traced.parts().total + workspaces, pace)
