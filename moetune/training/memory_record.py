"""Predicted beside measured, for every run: `memory.json`, and a warning when the two are far apart."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moetune.adapt.build import Adapted
from moetune.adapt.fake import tensors_of
from moetune.catalog.gpus import Gpu, find_gpu
from moetune.errors import UserError
from moetune.experts.links import read_rows
from moetune.memory.allocator import WORKSPACES
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.live import Refused, refused_by_tracker, watch_cuda
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.trace import named_modules, trace
from moetune.memory.trace.tracker import Tracker
from moetune.memory.verify import TOLERANCE, catalog_name
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.report.units import gib
from moetune.run.resolve import ResolvedRun
from moetune.training.run_folder import RunFolder

MEASURED_STEPS = 2
"""Optimizer states appear in the first step; the second is like all that follow."""


class MemoryRecord(TrainerCallback):
    """Measures the first steps: on a CPU with the tracker that a trace uses, on CUDA with torch's counters."""

    def __init__(self, adapted: Adapted, folder: RunFolder, console: Console) -> None:
        self.adapted, self.folder, self.console = adapted, folder, console
        self.device = adapted.model.device
        self.card = find_gpu(catalog_name(self.device)) if self.device.type == "cuda" else None
        self._what = adapted.run, adapted.ranks, self.card
        self.predicted = predicted_peak(*self._what)
        self._as_routed: int | None = None
        self.load: dict[int, Tensor] = {}
        self._tracker = Tracker(named_modules(adapted))
        self._tracking = ExitStack()
        self._fullest: dict[int, list[int]] = {}  # by layer, the rows of the call in which an expert received most
        self._steps = 0
        self._measured: dict[str, int | None] | None = None
        self._seen = watch_cuda() if self.device.type == "cuda" else {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._steps:
            self._begin(kwargs["optimizer"])

    def begin_again(self, run: ResolvedRun, optimizer: Any) -> None:
        """Measures the step under way from its beginning, as one of another run file."""
        if self._measured is not None:
            return
        self._tracking.close()
        self._what = run, *self._what[1:]
        self.predicted = predicted_peak(*self._what)
        self._tracker = Tracker(self._tracker.modules, self._tracker.limit)
        self._fullest, self._steps = {}, 0
        self._begin(optimizer)

    def refused(self) -> Refused | None:
        """Ends the measurement. What the device held when it last had no more to give; None if that is not known."""
        self._tracking.close()
        return self._seen.get(self.device.index or 0) or refused_by_tracker(self._tracker)

    def _begin(self, optimizer: Any) -> None:
        self._tracking.enter_context(self.adapted.links.counting_by(self._count_rows))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        for tensor in tensors_of(self.adapted.model):
            self._tracker.add(tensor)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        for tensor in (*optimizer.masters(), *optimizer.states()):  # states are there if the run was resumed
            self._tracker.add(tensor)
        self._tracking.enter_context(self._tracker)

    def _count_rows(self, layer: int, ids: Tensor, num_experts: int) -> list[int]:
        rows = read_rows(layer, ids, num_experts)
        self._fullest[layer] = max(self._fullest.get(layer, rows), rows, key=max)
        return rows

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps == MEASURED_STEPS:
            self.finish()

    def finish(self) -> None:
        """Ends the measurement and writes what there is. Called again, it writes the tokens received since."""
        self._tracking.close()
        if not self._steps:
            return
        on_cuda, is_first = self.device.type == "cuda", self._measured is None
        if self._measured is None:
            self._measured = {
                "peak_allocated": torch.cuda.max_memory_allocated(self.device) if on_cuda else self._tracker.peak_bytes,
                "peak_reserved": torch.cuda.max_memory_reserved(self.device) if on_cuda else None,
            }
            load = tuple((layer, tuple(map(float, rows))) for layer, rows in sorted(self._fullest.items()))
            routing = Routing("measured", None, load) if load else BALANCED
            self._as_routed = None if self.predicted is None else predicted_peak(*self._what, routing)
        self.folder.write_memory(
            {
                "schema": 1,
                "device": torch.cuda.get_device_name(self.device) if on_cuda else "cpu",
                "steps": min(self._steps, MEASURED_STEPS),
                "predicted": {"peak_allocated": self.predicted, "as_routed": self._as_routed},
                "measured": self._measured,
                "expert_load": {str(layer): load.tolist() for layer, load in self.load.items()},
            }
        )
        measured, predicted = self._measured["peak_allocated"], self._as_routed or self.predicted
        if not predicted or not measured or not is_first or self._steps < MEASURED_STEPS:
            return
        if abs(predicted / measured - 1) > TOLERANCE:
            self.console.print(
                f"memory: predicted {gib(predicted)}, for the tokens that each expert received, measured "
                f"{gib(measured)}; the prediction assumes full sequences and micro-batches",
                highlight=False,
                soft_wrap=True,
            )


def predicted_peak(
    run: ResolvedRun, ranks: Ranks = SINGLE_RANK, card: Gpu | None = None, routing: Routing = BALANCED
) -> int | None:
    """The peak of what this rank allocates, by closed form, or by a trace if there is none.

    One of several ranks cannot record a step while it runs: None, unless it was recorded before (`record_ahead`).

    Args:
        card: whose kernels run, and whose workspaces are allocated; None for the CPU's.
        routing: what the experts receive.
    """
    workspaces = 0 if card is None else WORKSPACES * card.cublas_workspace.value
    try:
        found = ClosedForm(run, ranks.rank, card).at(run.config, routing, may_record=ranks.is_single)
        return None if found is None else found.parts.total + workspaces
    except UserError:
        if not ranks.is_single:
            return None
    try:
        traced = trace(run, routing, gpu=card)
    except UserError:
        return None
    return traced.parts(traced.peak).total + workspaces
