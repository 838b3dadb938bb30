"""A run folder, as it is read.

    run.yaml, base.json, inputs.json     what the run was started with
    metrics.jsonl                        a line for each logged step and evaluation
    memory.json, out_of_memory.json      memory, predicted and measured; where it ran out
    checkpoints/step-N/                  also holds run.yaml, inputs.json and metrics.jsonl as they were
    .moetune                             a list of what moetune wrote

A checkpoint gets its final name when it is complete, and its manifest has the digest of every file. So its copies show
whether the folder's own files are damaged.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import IO

from moetune.documents import read_sealed
from moetune.errors import UserError
from moetune.files import expanded, lock
from moetune.models.hub.fingerprint import Base
from moetune.run.records import MetricsLine, parse_metrics
from moetune.training.inputs import Inputs
from moetune.training.manifest import MANIFEST, damage
from moetune.training.same_run import FREE_ON_EXPORT, changed_settings

RUN_FILE, BASE_FILE, INPUTS_FILE, MEMORY_FILE = "run.yaml", "base.json", "inputs.json", "memory.json"
METRICS_FILE, DRIFT_FILE, PAGE_FILE = "metrics.jsonl", "drift.json", "report.html"
OUT_OF_MEMORY_FILE = "out_of_memory.json"


class RunFolder:
    """The folder of one run. Reading needs no lock, also while the run goes on.

    Attributes:
        damaged: checkpoints that `newest_whole` passed over, each with the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = expanded(path)
        self.metrics_file = self.path / METRICS_FILE
        self.checkpoints_path = self.path / "checkpoints"
        self.damaged: list[str] = []
        self._held: IO[bytes] | None = None

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        found = (path for path in self.checkpoints_path.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
        return sorted(found, key=step_of)

    def newest_whole(self, *, hold: bool = False) -> Path | None:
        """Return the newest checkpoint that is not damaged; None if there is no checkpoint.

        Args:
            hold: keep the run that writes here from removing it, as long as this object lives.

        Raises:
            UserError: all checkpoints are damaged; or it belongs to another run or run file.
        """
        self.damaged = []
        there = self.checkpoints()
        for checkpoint in reversed(there):
            if hold:
                with suppress(OSError):  # it was removed meanwhile, or its file system has no locks
                    self._held = lock(checkpoint / MANIFEST, "rb", shared=True)
            reason = damage(checkpoint)
            if reason is None:
                self.refuse_foreign_checkpoint(checkpoint)
                return checkpoint
            self.damaged.append(f"{checkpoint}: {reason}")
            if there != self.checkpoints():  # a run goes on
                return self.newest_whole(hold=hold)
        if self.damaged:
            raise UserError(
                f"no checkpoint of the run in {str(self.path)!r} is whole:\n  "
                + "\n  ".join(self.damaged)
                + "\nStart anew with --overwrite, or choose another output"
            )
        return None

    def refuse_foreign_checkpoint(self, checkpoint: Path) -> None:
        """Raise `UserError` unless an undamaged checkpoint is of this run and its run file."""
        its, mine = self.inputs(checkpoint), self.inputs()
        if its is not None and mine is None:
            raise UserError(f"{str(self.path / INPUTS_FILE)!r} is missing; copy it back from {str(checkpoint)!r}")
        if its is not None and mine is not None and its.run != mine.run:
            raise UserError(f"checkpoint {str(checkpoint)!r} is of another run than {str(self.path)!r}; move it away")
        before, now = checkpoint / RUN_FILE, self.path / RUN_FILE
        if before.is_file() and now.is_file() and (changed := changed_settings(before, now, FREE_ON_EXPORT)):
            raise UserError(
                f"{str(now)!r} was changed after {checkpoint.name} was written:\n  "
                + "\n  ".join(changed)
                + f"\nCopy it back from {str(checkpoint)!r}"
            )

    def base(self) -> Base | None:
        """Return the recorded base; None if the file is missing; raise `UserError` if it is damaged."""
        file = self.path / BASE_FILE
        what = f"{str(file)!r}, which says what the run was trained on,"
        remedy = (
            "put back what it was, or, if model.path is that still, delete it: moetune train "
            f"{self.path / RUN_FILE} --resume auto notes it anew"
        )
        return read_sealed(file, Base, what, remedy) if os.path.lexists(file) else None

    def inputs(self, checkpoint: Path | None = None) -> Inputs | None:
        """Return the recorded inputs, of the folder or of a checkpoint; None if the file is missing.

        Raises:
            UserError: the file is damaged.
        """
        file = (checkpoint or self.path) / INPUTS_FILE
        return read_sealed(file, Inputs, remedy="copy it back from a checkpoint") if os.path.lexists(file) else None

    def metrics(self) -> list[MetricsLine]:
        """Return every whole line of `metrics.jsonl`; raise `UserError` as `parse_metrics`.

        Where the file does not begin with the newest checkpoint's copy it is damaged, and the copy is read.
        """
        text = self.metrics_file.read_bytes() if self.metrics_file.is_file() else b""
        for checkpoint in self.checkpoints()[-1:]:
            copy = checkpoint / METRICS_FILE
            if copy.is_file() and not text.startswith(whole := copy.read_bytes()) and damage(checkpoint) is None:
                text = whole
        return parse_metrics(text, self.metrics_file)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))
