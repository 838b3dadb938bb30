"""`moetune.train`, the Python API: training/run.py with a `Watch` for progress and memory."""

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console

from moetune.config.schema import TrainConfig
from moetune.errors import DoesNotFit
from moetune.memory.measurement.live import watch_cuda
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.planning.settle import settled_on
from moetune.report.console import terminal
from moetune.report.progress import ProgressBar, loading_progress
from moetune.run.dtypes import device_kind
from moetune.run.resolve import AnyRun, ResolvedRun, examine
from moetune.training import run as training
from moetune.training.loop import Loop, Watcher
from moetune.training.run import TrainResult
from moetune.training.step.observer import Where
from moetune.watch.memory_record import MemoryRecord
from moetune.watch.out_of_memory import describe_out_of_memory


class Watch(Watcher):
    """Observes a run: shows progress on a console, records its memory, and reports why memory ran out.

    The training loop calls the methods; `Watcher` says when.
    """

    def __init__(self, console: Console, device: torch.device) -> None:
        self.console, self.device = console, device
        self.progress = ProgressBar(console)
        self.memory: MemoryRecord | None = None
        self._seen = watch_cuda() if device.type == "cuda" else {}

    def settled(self, run: ResolvedRun, before: TrainConfig | None) -> ResolvedRun:
        return settled_on(run, self.device, before)

    def reading(self, folder: str | None) -> AbstractContextManager[Callable[[float], None] | None]:
        return loading_progress(self.console, folder)

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
            return None if refused is None else describe_out_of_memory(run, refused, Where(), self.device).error()
        refused = self.memory.refused()
        if refused is None:
            return None
        gc.collect()  # a checkpointed layer that failed keeps torch's hooks active, which would break a trace
        last = [str(checkpoint) for checkpoint in loop.folder.checkpoints()][-1:]
        return describe_out_of_memory(
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
    """Train as a run file says, and write the result into its run folder.

    Args:
        run: a run file (path, configuration), or a resolved run.
        resume: `never` for a new run; `auto` to continue from the newest checkpoint, if there is one; or the folder of
            a checkpoint.
        overwrite: replace an earlier run in the output folder.
        dry_run: check run file, data and output, count what would train, and stop without writing a file.
        device: by default the first device of the kind that the run is resolved for.
        console: where progress is shown; by default stderr, and nothing on ranks other than the first.
        ranks: the ranks of the run, of which this process is one. A dry run needs only one process.

    Raises:
        UserError: the run file, its data or its output has errors, reported together before any file is written; or
            training cannot go on, as with gradients that are not finite.
        DoesNotFit: memory ran out; `torch.OutOfMemoryError` if the reason could not be found.
        Interrupted: SIGINT or SIGTERM was received, and a checkpoint written.
    """
    run = examine(run, device_kind(device))
    console = console or terminal(stderr=True, quiet=not ranks.is_first)
    where = run.device(device)
    return training.train(
        run, Watch(console, where), console, where, resume=resume, overwrite=overwrite, dry_run=dry_run, ranks=ranks
    )
