"""`moetune.train`: training, and what watches it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console

from moetune.errors import DoesNotFit
from moetune.memory.live import watch_cuda
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.report.console import terminal
from moetune.report.progress import ProgressBar, reading
from moetune.run.dtypes import kind_of
from moetune.run.resolve import AnyRun, ResolvedRun
from moetune.run.resolve import examine as examine_run
from moetune.training import run as training
from moetune.training.loop import Loop, Watcher
from moetune.training.run import TrainResult
from moetune.training.step.observer import Where
from moetune.watch.memory_record import MemoryRecord
from moetune.watch.out_of_memory import examine


class Watch(Watcher):
    """Shows a run on a console, measures its memory beside what was predicted, and examines why it ran out."""

    def __init__(self, console: Console, device: torch.device) -> None:
        self.console, self.device = console, device
        self.progress = ProgressBar(console)
        self.memory: MemoryRecord | None = None
        self._seen = watch_cuda() if device.type == "cuda" else {}

    def reading(self, folder: str | None) -> AbstractContextManager[Callable[[float], None] | None]:
        return reading(self.console, folder)

    def begin(self, loop: Loop) -> None:
        self.memory = MemoryRecord(loop, self.console)
        self.pace = self.memory.predicted.pace
        self.progress.begin(loop.step, loop.config.train.steps)

    def step_begins(self) -> None:
        assert self.memory is not None
        self.memory.step_begins()

    def step_ends(self) -> None:
        assert self.memory is not None
        self.progress.step_ends()
        self.memory.step_ends()

    def logged(self, line: Mapping[str, Any]) -> None:
        self.progress.logged(line)

    def out_of_memory(self, run: ResolvedRun, loop: Loop | None) -> DoesNotFit | None:
        if loop is None or self.memory is None:
            refused = self._seen.get(self.device.index or 0)
            return None if refused is None else examine(run, refused, Where(), self.device).error()
        refused = self.memory.refused()
        if refused is None:
            return None
        gc.collect()  # a checkpointed layer that failed keeps torch's hooks on, which a trace would run into
        last = [str(checkpoint) for checkpoint in loop.folder.checkpoints()][-1:]
        return examine(
            loop.smaller_run(), refused, loop.where, self.device, loop.adapted, loop.optimizer, *last
        ).error()

    def end(self) -> None:
        self.progress.stop()
        if self.memory is not None:
            self.memory.finish()


def train(
    run: AnyRun,
    *,
    resume: str = "never",
    overwrite: bool = False,
    dry_run: bool = False,
    device: torch.device | str | None = None,
    console: Console | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> TrainResult:
    """Trains what the run file says and leaves the result in its run folder.

    Args:
        run: resolved for the kind of `device`, or a run file; its problems are reported with those of data and output.
        resume: `never`, `auto` or a checkpoint folder.
        dry_run: check run file, data and output, count what would train, and stop.
        device: by default the first of the kind that the run is resolved for.
        ranks: the ranks of the run, of which this process is one; a dry run needs none.

    Raises:
        UserError: anything that the user can mend. No file has been written then.
        DoesNotFit: memory ran out.
    """
    run = examine_run(run, kind_of(device))
    console = console or terminal(stderr=True, quiet=not ranks.is_first)
    where = run.device(device)
    return training.train(
        run, Watch(console, where), console, where, resume=resume, overwrite=overwrite, dry_run=dry_run, ranks=ranks
    )
