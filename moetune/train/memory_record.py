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
from moetune.config import RunConfig
from moetune.errors import UserError
from moetune.memory.facts import read_facts
from moetune.memory.formulas import set_up
from moetune.memory.layout import divide_run
from moetune.memory.trace import named_modules, trace
from moetune.memory.tracker import Tracker
from moetune.memory.verify import TOLERANCE
from moetune.parallel.ranks import ALONE, Ranks
from moetune.report.units import gib
from moetune.train.run_folder import RunFolder

MEASURED_STEPS = 2
"""Optimizer states appear in the first step; the second is like all that follow."""


class MemoryRecord(TrainerCallback):
    """Measures the first steps: on a CPU with the tracker that a trace uses, on CUDA with torch's counters."""

    def __init__(self, adapted: Adapted, config: RunConfig, folder: RunFolder, console: Console) -> None:
        self.adapted, self.config, self.folder, self.console = adapted, config, folder, console
        self.device = adapted.model.device
        self.predicted = predicted_peak(config, adapted.ranks)
        self.load: dict[int, Tensor] = {}
        self._tracker = Tracker(named_modules(adapted))
        self._tracking = ExitStack()
        self._steps = 0
        self._measured: dict[str, int | None] | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._steps:
            return
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        for tensor in tensors_of(self.adapted.model):
            self._tracker.add(tensor)
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        for tensor in (*optimizer.masters(), *optimizer.states()):  # states are there if the run was resumed
            self._tracker.add(tensor)
        self._tracking.enter_context(self._tracker)

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
        self.folder.write_memory(
            {
                "schema": 1,
                "device": torch.cuda.get_device_name(self.device) if on_cuda else "cpu",
                "steps": min(self._steps, MEASURED_STEPS),
                "predicted": {"peak_allocated": self.predicted},
                "measured": self._measured,
                "expert_load": {str(layer): load.tolist() for layer, load in self.load.items()},
            }
        )
        measured = self._measured["peak_allocated"]
        is_known = bool(self.predicted and measured)
        if is_first and self._steps == MEASURED_STEPS and is_known and abs(self.predicted / measured - 1) > TOLERANCE:
            self.console.print(
                f"memory: predicted {gib(self.predicted)}, measured {gib(measured)}; the prediction assumes full "
                "sequences and that every expert receives as many tokens as the others",
                highlight=False,
                soft_wrap=True,
            )


def predicted_peak(config: RunConfig, ranks: Ranks = ALONE) -> int:
    """The peak of what this rank allocates, by formula; by a trace if the model has no closed form.

    A rank cannot be traced while it runs: without a closed form, 0.
    """
    try:
        return divide_run(set_up(read_facts(config.model.path), config))[ranks.rank].quantities.peak()[1].total
    except UserError:
        if not ranks.alone:
            return 0
        traced = trace(config)
        return traced.parts(traced.peak).total
