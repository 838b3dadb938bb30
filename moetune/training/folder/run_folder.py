"""Reads a run folder: checkpoints, metrics, recorded base and inputs, best step, early stopping.

    run.yaml, base.json, inputs.json     what the run was started with
    metrics.jsonl                        a line for each logged step and each evaluation
    memory.json, out_of_memory.json      memory, predicted and measured; the state in which memory ran out
    checkpoints/step-N/                  one checkpoint, with copies of run.yaml and inputs.json
    .moetune                             the list of files that moetune wrote

A checkpoint gets its final name when it is complete, and its manifest has the SHA-256 of every file, and of
metrics.jsonl as it was then. So it shows whether run.yaml, inputs.json and metrics.jsonl in the run folder are damaged.
"""

import math
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from moetune.config.schema import EarlyStoppingConfig
from moetune.errors import UserError, reading
from moetune.files import expanded
from moetune.json_files import read_sealed
from moetune.models.hub.fingerprint import Base
from moetune.run.folder_files import MetricsLine, parse_metrics
from moetune.training.folder.manifest import begins_with, damage
from moetune.training.same_run import FREE_ON_EXPORT, Inputs, changed_settings

RUN_FILE, BASE_FILE, INPUTS_FILE, MEMORY_FILE = "run.yaml", "base.json", "inputs.json", "memory.json"
METRICS_FILE, DRIFT_FILE, PAGE_FILE = "metrics.jsonl", "drift.json", "report.html"
OUT_OF_MEMORY_FILE = "out_of_memory.json"


class RunFolder:
    """The folder of one run, for reading. No lock is needed, even while a run is writing there.

    `path` need not exist. `damaged` has a line for each checkpoint that the last `newest_whole` skipped: its path and
    what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = expanded(path)
        self.metrics_file = self.path / METRICS_FILE
        self.checkpoints_path = self.path / "checkpoints"
        self.damaged: list[str] = []

    def checkpoints(self) -> list[Path]:
        """Return the folders of the complete checkpoints, oldest first; they may be damaged."""
        folders = (path for path in self.checkpoints_path.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
        return sorted(folders, key=step_of)

    def by_preference(self, *, best: bool) -> list[Path]:
        """Return the folders of the complete checkpoints, newest first; with `best`, the one of the lowest held-out
        loss is put before all others."""
        by_step = {step_of(path): path for path in reversed(self.checkpoints())}
        held_out = self.held_out() if best else {}
        first = best_step({step: held_out[step] for step in by_step if step in held_out})
        return sorted(by_step.values(), key=lambda path: step_of(path) != first)

    def newest_whole(self, *, best: bool = False) -> Path | None:
        """Return the folder of the newest undamaged checkpoint; None if there is no checkpoint at all.

        Args:
            best: prefer the checkpoint with the lowest held-out loss to newer ones.

        Raises:
            UserError: all checkpoints are damaged; the one found is of another run or has other settings than
                `run.yaml` (`refuse_foreign_checkpoint`); or, with `best`, the metrics cannot be read.
        """
        self.damaged = []
        listed = self.checkpoints()
        for checkpoint in self.by_preference(best=best):
            reason = damage(checkpoint)
            if reason is None:
                self.refuse_foreign_checkpoint(checkpoint)
                return checkpoint
            self.damaged.append(f"{checkpoint}: {reason}")
            if listed != self.checkpoints():  # a run is writing here: look again
                return self.newest_whole(best=best)
        if self.damaged:
            raise UserError(
                f"no checkpoint of the run in {str(self.path)!r} is undamaged:\n  "
                + "\n  ".join(self.damaged)
                + "\nStart a new run with --overwrite, or choose another output"
            )
        return None

    def refuse_foreign_checkpoint(self, checkpoint: Path) -> None:
        """Raise `UserError` if an undamaged checkpoint is of another run, or has other settings than `run.yaml` now.

        Settings in `FREE_ON_EXPORT`, such as `output` and `train.steps`, may differ.
        """
        if self.inputs(checkpoint).run != self.inputs().run:
            raise UserError(f"checkpoint {str(checkpoint)!r} is of another run than {str(self.path)!r}; move it away")
        before, now = checkpoint / RUN_FILE, self.path / RUN_FILE
        if changed := changed_settings(before, now, FREE_ON_EXPORT):
            raise UserError(
                f"{str(now)!r} was changed after {checkpoint.name} was written:\n  "
                + "\n  ".join(changed)
                + f"\nCopy it back from {str(checkpoint)!r}"
            )

    def base(self) -> Base | None:
        """Return the base that `base.json` records; None if there is no such file, `UserError` if it is damaged."""
        file = self.path / BASE_FILE
        what = f"{str(file)!r}, which says what the run was trained on,"
        remedy = (
            "restore it, or, if model.path has not changed, delete it: moetune train "
            f"{self.path / RUN_FILE} --resume auto records it again"
        )
        return read_sealed(file, Base, what, remedy) if os.path.lexists(file) else None

    def inputs(self, checkpoint: Path | None = None) -> Inputs:
        """Return the inputs that `inputs.json` records, in the run folder or, if given, in the folder `checkpoint`.

        Raises:
            UserError: the file is missing or damaged.
        """
        return read_sealed((checkpoint or self.path) / INPUTS_FILE, Inputs, remedy="copy it back from a checkpoint")

    def clock(self) -> datetime | None:
        """Return the time at which the run began, if there is a run whose chat template writes it into the data."""
        if not os.path.lexists(self.path / INPUTS_FILE) or (inputs := self.inputs()).clock is None:
            return None
        with reading(f"clock in {str(self.path / INPUTS_FILE)!r}", "copy the file back from a checkpoint"):
            return datetime.fromisoformat(inputs.clock)

    def metrics(self) -> list[MetricsLine]:
        """Return every complete line of `metrics.jsonl`; an empty list if there is no file.

        Raises:
            UserError: a line is not what a run writes (`parse_metrics`), or was changed after the newest checkpoint was
                written.
        """
        for checkpoint in self.checkpoints()[-1:]:
            self.metrics_until(checkpoint)
        return parse_metrics(self._metrics_text(), self.metrics_file)

    def _metrics_text(self) -> bytes:
        return self.metrics_file.read_bytes() if self.metrics_file.is_file() else b""

    def metrics_until(self, checkpoint: Path) -> bytes:
        """Return the beginning of `metrics.jsonl` that had been written when a checkpoint was.

        It is empty if the file was moved away or emptied since, or begins with a later step. Raises `UserError` if it
        was changed.
        """
        text = self._metrics_text()
        if (beginning := begins_with(text, checkpoint)) is not None:
            return beginning
        first = parse_metrics(b"".join(text.partition(b"\n")[:2]), self.metrics_file)
        if not first or first[0]["step"] > step_of(checkpoint):
            return b""
        raise UserError(
            f"{str(self.metrics_file)!r} was changed after {checkpoint.name} was written; restore it, or move it away: "
            "the run then goes on without its earlier losses"
        )

    def held_out(self) -> dict[int, float]:
        """Return step -> held-out loss of the evaluations after the first update, as in the metrics; NaN for null."""
        losses = {line["step"]: line["eval_loss"] for line in self.metrics() if line["step"] and "eval_loss" in line}
        return {step: math.nan if loss is None else loss for step, loss in losses.items()}


def best_step(held_out: Mapping[int, float]) -> int | None:
    """Return the step of the lowest finite loss in `held_out` (step -> loss), the first of equal ones; None without."""
    finite = sorted(step for step, loss in held_out.items() if math.isfinite(loss))
    return min(finite, key=held_out.__getitem__, default=None)


def is_stopped(held_out: Mapping[int, float], early: EarlyStoppingConfig | None) -> bool:
    """Return whether early stopping ends a run: at least `early.patience` evaluations came after the best one.

    `held_out` is step -> held-out loss. False without `early` or a finite loss.
    """
    best = best_step(held_out)
    return early is not None and best is not None and sum(step > best for step in held_out) >= early.patience


def step_of(checkpoint: Path) -> int:
    """Return the step N of a checkpoint from the name of its folder, `step-N`."""
    return int(checkpoint.name.removeprefix("step-"))
