"""The run folder: `run.yaml`, `metrics.jsonl` and `checkpoints/step-N/`, and the rules for writing to it.

A checkpoint is written aside and renamed, so that one with its final name is whole. `metrics.jsonl` holds one line a
logged step; on resume the lines after the checkpoint are dropped, because those steps run again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from moetune.config import RunConfig
from moetune.errors import UserError

RUN_FILE = "run.yaml"
_FREE_ON_RESUME = {
    "output", "hardware", "train.steps", "train.log_every", "train.eval_every", "train.save_every",
    "train.keep_checkpoints", "train.report_to", "train.eval_micro_batch",
}  # fmt: skip


class RunFolder:
    """One run's folder. Nothing is written before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints_path = path / "checkpoints"

    def check(self, config: RunConfig, resume: str, overwrite: bool) -> Path | None:
        """Decides, without changing anything, whether the run may start here and from which checkpoint.

        Args:
            resume: `never`, `auto` (from the newest checkpoint, or from the start if there is none) or a checkpoint.

        Raises:
            UserError: the folder holds something else, holds a run and no decision was made about it, cannot be
                written, or holds a run that differs from the one to resume.
        """
        if resume != "never" and overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        self._check_writable()
        occupied = self.path.exists() and any(self.path.iterdir())
        is_run = (self.path / RUN_FILE).is_file()
        if occupied and not is_run:
            raise UserError(f"output {str(self.path)!r} exists and is not a run folder; choose another output")
        if occupied and resume == "never" and not overwrite:
            raise UserError(
                f"output {str(self.path)!r} already holds a run; continue it with --resume auto, replace it with "
                "--overwrite, or choose another output"
            )
        if resume == "never":
            return None
        if resume != "auto":
            checkpoint = Path(resume)
            if not (checkpoint / "trainer_state.json").is_file():
                raise UserError(
                    f"--resume {resume!r}: no checkpoint there; use auto, never or a checkpoints/step-N folder"
                )
        else:
            newest = self.checkpoints()[-1:]
            checkpoint = newest[0] if newest else None
        if is_run:
            self._check_same_run(config)
        return checkpoint

    def create(self, config: RunConfig, checkpoint: Path | None, overwrite: bool) -> None:
        """Makes the folder and writes the resolved run file; drops what a killed run left half-written."""
        if overwrite and (self.path / RUN_FILE).is_file():
            shutil.rmtree(self.path)
        self.checkpoints_path.mkdir(parents=True, exist_ok=True)
        for leftover in self.checkpoints_path.glob(".*"):
            shutil.rmtree(leftover)
        _write_atomically(self.path / RUN_FILE, config.to_yaml())
        kept = [] if checkpoint is None else self._metrics_until(_step_of(checkpoint))
        _write_atomically(self.metrics_file, "".join(json.dumps(line) + "\n" for line in kept))

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = (path for path in self.checkpoints_path.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
        return sorted(found, key=_step_of)

    @contextmanager
    def new_checkpoint(self, step: int, keep: int) -> Iterator[Path]:
        """Yields a folder to write to; at the end it takes its final name and checkpoints beyond `keep` go."""
        final, aside = self.checkpoints_path / f"step-{step}", self.checkpoints_path / f".step-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for file in aside.iterdir():
            _sync(file)
        _sync(aside)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        _sync(self.checkpoints_path)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)

    def append_metrics(self, line: dict[str, Any]) -> None:
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of `metrics.jsonl`; a line that a kill cut short is left out."""
        lines = []
        if self.metrics_file.is_file():
            for text in self.metrics_file.read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(text))
                except json.JSONDecodeError:
                    break
        return lines

    def _metrics_until(self, step: int) -> list[dict[str, Any]]:
        return [line for line in self.metrics() if line["step"] <= step]

    def _check_writable(self) -> None:
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        probe = existing / f".moetune-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise UserError(f"output {str(self.path)!r} cannot be written: {error.strerror} ({existing})") from None

    def _check_same_run(self, config: RunConfig) -> None:
        before = _flatten(yaml.safe_load((self.path / RUN_FILE).read_text(encoding="utf-8")))
        now = _flatten(yaml.safe_load(config.to_yaml()))
        changed = [
            f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
            and not any(key == free or key.startswith(f"{free}.") for free in _FREE_ON_RESUME)
        ]
        if changed:
            raise UserError(
                f"the run in {str(self.path)!r} cannot be resumed with another run file:\n  "
                + "\n  ".join(changed)
                + "\nSet these back, or choose another output"
            )


def _step_of(checkpoint: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if match is None:
        raise UserError(f"{str(checkpoint)!r} is not a checkpoint; those are named step-N")
    return int(match[1])


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    aside.rename(path)


def _sync(path: Path) -> None:
    """Makes sure that what was written survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
