"""The run folder: `run.yaml`, `base.json`, `metrics.jsonl` and `checkpoints/step-N/`, and the rules for writing to it.

A checkpoint is written aside and renamed, and renamed before it is removed, so that one with its final name is whole.
It holds `run.yaml` and `metrics.jsonl` as they were, under its seal: damage to the folder's own is found by them.
`metrics.jsonl` holds one line a logged step; on resume it is what the checkpoint has, because later steps run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from moetune.config import RunConfig
from moetune.errors import UserError
from moetune.hub.fingerprint import Base
from moetune.parallel.coordinates import data_ranks
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.training.manifest import damage, write_manifest

RUN_FILE, BASE_FILE, MEMORY_FILE = "run.yaml", "base.json", "memory.json"
_OWN = (RUN_FILE, BASE_FILE, "metrics.jsonl", MEMORY_FILE, "checkpoints", "runs", "delta", "adapter", "report.html")
"""What moetune writes into a run folder (`runs` is TensorBoard's), and all that `--overwrite` removes from one."""
_FREE_ON_RESUME = {
    "output", "hardware", "parallel", "train.steps", "train.epochs", "train.log_every", "train.eval_every",
    "train.save_every", "train.keep_checkpoints", "train.report_to", "train.eval_micro_batch",
}  # fmt: skip
_FREE_ON_EXPORT = _FREE_ON_RESUME | {"model.path", "model.weights"}
"""The base may have moved since."""
_MOST_PROBLEMS = 10


class RunFolder:
    """One run's folder. Nothing is written before `create`. Of several ranks the first one writes; checkpoints are
    written by all."""

    def __init__(self, path: Path, ranks: Ranks = SINGLE_RANK) -> None:
        self.path, self.ranks = path.expanduser(), ranks
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.damaged: list[str] = []
        """Checkpoints that `newest_whole` passed over, each with what is wrong with it."""

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
        occupied, is_run = self._is_occupied(), self._is_run()
        if occupied and not is_run and (checkpoints := self.checkpoints()):
            raise UserError(
                f"output {str(self.path)!r} has checkpoints and no {RUN_FILE}: copy it back from "
                f"{str(checkpoints[-1])!r}, or choose another output"
            )
        if occupied and not is_run:
            raise UserError(f"output {str(self.path)!r} exists and is not a run folder; choose another output")
        if occupied and resume == "never" and not overwrite:
            raise UserError(
                f"output {str(self.path)!r} already holds a run; continue it with --resume auto, replace it with "
                "--overwrite, or choose another output"
            )
        if resume == "never":
            return None
        newest = self.newest_whole() if resume == "auto" else None
        if is_run:
            self._check_same_run(config)
        checkpoints = self.checkpoints()
        if resume == "auto":
            return newest
        wanted = Path(resume).expanduser().resolve()
        chosen = [checkpoint for checkpoint in checkpoints if checkpoint.resolve() == wanted]
        if not chosen:
            there = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
            raise UserError(
                f"--resume {resume!r} is no checkpoint of the run in {str(self.path)!r}; use auto, never or one of "
                f"{str(self.checkpoints_path)!r}, which has: {there}"
            )
        return chosen[0]

    def create(self, config: RunConfig, checkpoint: Path | None, overwrite: bool, base: Base | None = None) -> None:
        """Makes the folder and writes the resolved run file, and the base unless the weights are random.

        On resume, what came after the checkpoint goes: those steps run again. So does what a kill left half-written.
        """
        self.ranks.barrier()  # all have read what is there
        if self.ranks.is_first:
            self._create(config, checkpoint, overwrite, base)
        self.ranks.barrier()

    def _create(self, config: RunConfig, checkpoint: Path | None, overwrite: bool, base: Base | None) -> None:
        if overwrite and self._is_run():
            self._remove_run()
        try:
            self.checkpoints_path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output {str(self.path)!r} cannot be written: {error.strerror}") from None
        step = 0 if checkpoint is None else step_of(checkpoint)
        self.remove_leftovers()
        for later in self.checkpoints():
            if step_of(later) > step:
                _discard(later)
        _write_atomically(self.path / RUN_FILE, config.to_yaml())
        if base is not None:
            self.write_base(base)
        kept = "" if checkpoint is None else (checkpoint / self.metrics_file.name).read_text(encoding="utf-8")
        _write_atomically(self.metrics_file, kept)

    def remove_leftovers(self) -> None:
        """Removes checkpoints that a kill left half-written, or half-removed, and files that it left aside."""
        for leftover in self.checkpoints_path.glob(".step-*"):
            shutil.rmtree(leftover)
        for name in (RUN_FILE, BASE_FILE, MEMORY_FILE, self.metrics_file.name):
            _aside(self.path / name).unlink(missing_ok=True)

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = (path for path in self.checkpoints_path.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
        return sorted(found, key=step_of)

    def newest_whole(self) -> Path | None:
        """The newest checkpoint of which every byte is as it was written; None if there is none.

        Raises:
            UserError: there are some, and all are damaged; or the run file is not the one that it was written with.
        """
        self.damaged = []
        for checkpoint in reversed(self.checkpoints()):
            reason = damage(checkpoint)
            if reason is None:
                self._check_run_file(checkpoint)
                return checkpoint
            self.damaged.append(f"{checkpoint}: {reason}")
        if self.damaged:
            raise UserError(
                f"no checkpoint of the run in {str(self.path)!r} is whole:\n  "
                + "\n  ".join(self.damaged)
                + "\nStart anew with --overwrite, or choose another output"
            )
        return None

    def refuse_full_disk(self, needed: int) -> None:
        """Raises `UserError` if the disk has no room for so many bytes."""
        free = shutil.disk_usage(next(p for p in (self.path, *self.path.absolute().parents) if p.exists())).free
        if free < needed:
            raise UserError(
                f"output {str(self.path)!r}: checkpoints need {needed:,} bytes there and {free:,} are free; free some, "
                "lower train.keep_checkpoints, or choose another output"
            )

    @contextmanager
    def new_checkpoint(self, step: int, keep: int, needed: int = 0) -> Iterator[Path]:
        """Yields a folder to write to; at the end it is sealed, takes its final name, and checkpoints beyond `keep` go.
        Every rank writes its part.

        Args:
            needed: bytes that will be written.

        Raises:
            UserError: the disk is full. Nothing half-written is left, and earlier checkpoints are as they were.
        """
        final, aside = self.checkpoints_path / f"step-{step}", self.checkpoints_path / f".step-{step}"
        first = self.ranks.is_first
        try:
            if first:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
            self.ranks.barrier()
            yield aside
            self.ranks.barrier()
            if first:
                for file in (self.path / RUN_FILE, self.metrics_file):
                    shutil.copyfile(file, aside / file.name)
                write_manifest(aside, step)
                for file in (*aside.rglob("*"), self.metrics_file):
                    sync(file)
                sync(aside)
                aside.rename(final)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            if first:
                shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self.path).free
            if free > needed:
                raise
            last = [checkpoint.name for checkpoint in self.checkpoints()][-1:] or ["none yet"]
            raise UserError(
                f"step {step}: the disk of {str(self.path)!r} is full: a checkpoint needs {needed:,} bytes and "
                f"{free:,} are free. The last complete one is {last[0]}; free some space and go on with --resume auto"
            ) from error
        if not first:
            return
        sync(self.checkpoints_path)
        for old in self.checkpoints()[:-keep]:
            _discard(old)

    def append_metrics(self, line: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise UserError(
                f"{str(self.metrics_file)!r} cannot be written: {error.strerror}; then go on with --resume auto"
            ) from error

    def write_base(self, base: Base) -> None:
        """Writes `base.json`: the base's name and fingerprint, and a digest of what the file says."""
        _write_atomically(self.path / BASE_FILE, _base_text(base))

    def base(self) -> Base | None:
        """What the run noted of its base; None if the file is missing.

        Raises:
            UserError: the file is damaged.
        """
        file = self.path / BASE_FILE
        try:
            text = file.read_text(encoding="utf-8")
            base = Base.from_json(json.loads(text))
            if text != _base_text(base):
                raise UserError("it was changed after it was written")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, UserError) as error:
            raise UserError(
                f"{str(file)!r} is damaged: {error}. It says what the run was trained on; put back what it was, or, if "
                f"model.path is that still, delete it: moetune train {self.path / RUN_FILE} --resume auto notes it anew"
            ) from None
        return base

    def write_memory(self, record: dict[str, Any]) -> None:
        """Writes `memory.json`: predicted beside measured, and how many tokens each expert received."""
        if not self.ranks.is_first:
            return
        with suppress(OSError):  # a run can do without it, and on a full disk another error says so
            _write_atomically(self.path / MEMORY_FILE, json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of `metrics.jsonl`; a line that a kill cut short is left out.

        A file that does not begin as the newest checkpoint has it was damaged: then the lines are the checkpoint's.
        """
        text = self.metrics_file.read_bytes() if self.metrics_file.is_file() else b""
        for checkpoint in self.checkpoints()[-1:]:
            known = checkpoint / self.metrics_file.name
            if known.is_file() and not text.startswith(whole := known.read_bytes()):
                text = whole
        lines = []
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines

    def _is_occupied(self) -> bool:
        """Whether anything is in the folder, beyond what a run leaves that was killed in its first instant."""
        first = (f".{RUN_FILE}", self.checkpoints_path.name)
        return self.path.exists() and (
            any(item.name not in first for item in self.path.iterdir())
            or (self.checkpoints_path.exists() and any(self.checkpoints_path.iterdir()))
        )

    def _is_run(self) -> bool:
        """Whether it holds a run. A run file alone does not make it one: `moetune init` writes one anywhere."""
        return (self.path / RUN_FILE).is_file() and self.checkpoints_path.is_dir()

    def _remove_run(self) -> None:
        for name in _OWN:
            item = self.path / name
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink(missing_ok=True)

    def _check_writable(self) -> None:
        where = self.path
        try:
            where = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
            probe = where / f".moetune-{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise UserError(
                f"output {str(self.path)!r} cannot be written: {error.strerror} ({where}); choose another output"
            ) from None

    def _check_run_file(self, checkpoint: Path) -> None:
        """Compares the run file with the checkpoint's own, which is sealed. What may change on resume may differ."""
        if not (checkpoint / RUN_FILE).is_file() or not (self.path / RUN_FILE).is_file():
            return
        before = _settings((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
        if changed := _changes(before, self._read_run_file(), _FREE_ON_EXPORT):
            raise UserError(
                f"{str(self.path / RUN_FILE)!r} was changed after {checkpoint.name} was written:\n  "
                + "\n  ".join(changed)
                + f"\nCopy it back from {str(checkpoint)!r}"
            )

    def _check_same_run(self, config: RunConfig) -> None:
        if changed := _changes(self._read_run_file(), _settings(config.to_yaml()), _FREE_ON_RESUME):
            raise UserError(
                f"the run in {str(self.path)!r} cannot be resumed with another run file:\n  "
                + "\n  ".join(changed)
                + "\nSet these back, or choose another output"
            )

    def _read_run_file(self) -> dict[str, Any]:
        try:
            return _settings((self.path / RUN_FILE).read_text(encoding="utf-8"))
        except (yaml.YAMLError, OSError, ValueError) as error:
            raise UserError(
                f"the run in {str(self.path)!r} cannot be resumed: its {RUN_FILE} cannot be read: {error}"
            ) from None


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def _base_text(base: Base) -> str:
    body = {"schema": 1, **base.to_json()}
    return json.dumps({**body, "seal": hashlib.sha256(json.dumps(body).encode()).hexdigest()}, indent=2) + "\n"


def _discard(checkpoint: Path) -> None:
    aside = checkpoint.with_name(f".{checkpoint.name}")
    checkpoint.rename(aside)
    shutil.rmtree(aside)


def _settings(text: str) -> dict[str, Any]:
    """A stored run file, flat. Keys that are newer than the file have their defaults, by which it was run."""
    tree = yaml.safe_load(text)
    with suppress(ValidationError):  # what is no run file any more is compared as it stands, and named
        config = RunConfig.model_validate(tree)
        tree = config.model_dump(mode="json")
        # More ranks with fewer micro-batches each take the same step.
        together = tree["train"].pop("accumulate") * data_ranks(config.parallel)
        tree["train"]["accumulate, over all ranks"] = together
    return _flatten(tree)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _changes(before: dict[str, Any], now: dict[str, Any], free: set[str]) -> list[str]:
    """One line for each setting that differs and is not free to; beyond some, how many more there are."""
    changed = [
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
    more = len(changed) - _MOST_PROBLEMS
    return [*changed[:_MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]


def _aside(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}")


def _write_atomically(path: Path, text: str) -> None:
    aside = _aside(path)
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    aside.rename(path)


def sync(path: Path) -> None:
    """Makes sure that what was written survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
