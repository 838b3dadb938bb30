"""The run folder: `run.yaml`, `base.json`, `inputs.json`, `metrics.jsonl`, `checkpoints/step-N/`; the rules of writing.

A checkpoint is written aside and renamed, and renamed before it is removed, so that one with its final name is whole.
It holds `run.yaml`, `inputs.json` and `metrics.jsonl` as they were, under its seal: damage to the folder's own is found
by them.
`.moetune` lists what moetune has written there. Whatever else is there is a user's: it is neither replaced nor removed.
`metrics.jsonl` holds one line a logged step; on resume it is what the checkpoint has, because later steps run again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from moetune.config.load import refuse_existing_run
from moetune.config.schema import RunConfig
from moetune.documents import read_sealed, sealed
from moetune.errors import UserError
from moetune.files import (
    Ledger,
    WriterLock,
    aside_of,
    expanded,
    foreign_in,
    lock,
    refuse_taken,
    refused,
    settle,
    sync,
    write_whole,
)
from moetune.models.hub.fingerprint import Base
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.records import MetricsLine, parse_metrics
from moetune.training.inputs import Inputs
from moetune.training.manifest import MANIFEST, damage, files_in, sealed_files, write_manifest
from moetune.training.same_run import FREE_ON_EXPORT, FREE_ON_RESUME, changes, settings

RUN_FILE, BASE_FILE, INPUTS_FILE, MEMORY_FILE = "run.yaml", "base.json", "inputs.json", "memory.json"
DRIFT_FILE, PAGE_FILE, OUT_OF_MEMORY_FILE = "drift.json", "report.html", "out_of_memory.json"
_FILES = (RUN_FILE, BASE_FILE, INPUTS_FILE, "metrics.jsonl", MEMORY_FILE, OUT_OF_MEMORY_FILE)
_WRITTEN = (*_FILES, *(f".{name}" for name in _FILES))
"""What training writes into a run folder beside its checkpoints, and where it is written aside."""


class RunFolder:
    """One run's folder. Nothing is written before `create`. Of several ranks the first one writes; checkpoints are
    written by all. One process at a time writes, from `lock` to `close`; readers need no lock."""

    def __init__(self, path: Path, ranks: Ranks = SINGLE_RANK) -> None:
        self.path, self.ranks = expanded(path), ranks
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self._lock, self._ledger = WriterLock(self.path), Ledger(self.path)
        self._found: list[str] | None = None  # what `check` decided upon
        self._read: IO[bytes] | None = None
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
        if self.ranks.is_first:  # who looks what there is, and would find what others tried
            self._check_writable()
        self._take_lock(create=False)
        self._found, self._ledger = self._contents(), Ledger(self.path)
        occupied, is_run = self._is_occupied(), self._is_run()
        is_marked = self._ledger.kind == "run"
        if overwrite and is_marked:
            is_run = True
        if occupied and is_marked and not is_run and (checkpoints := self.checkpoints()):
            raise UserError(
                f"output {str(self.path)!r} has checkpoints and no {RUN_FILE}: copy it back from "
                f"{str(checkpoints[-1])!r}, or choose another output"
            )
        if occupied and not is_run:
            raise UserError(f"output {str(self.path)!r} exists and is not a run folder; choose another output")
        if occupied and resume == "never":
            if not overwrite:
                refuse_existing_run(self.path)
            if not is_marked:
                raise UserError(
                    f"output {str(self.path)!r} holds a run without {Ledger.NAME}, the list of what moetune wrote: it "
                    "is of an earlier version, or was copied without that file. Continue it with --resume auto, which "
                    "notes it, or choose another output"
                )
        if resume == "never":
            self._refuse_foreign(0)
            return None
        checkpoint = self.newest_whole() if resume == "auto" else self._chosen(resume)
        if is_run:
            self._check_same_run(config)
        self._refuse_foreign(0 if checkpoint is None else step_of(checkpoint))
        return checkpoint

    def lock(self) -> None:
        """Makes the folder, and sees to it that no other process writes to it until `close`.

        Raises:
            UserError: one does, or did since `check`; or the folder cannot be made.
        """
        try:
            if self.ranks.is_first:
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output {str(self.path)!r} cannot be written: {error.strerror}") from None
        self._take_lock(create=True)
        if self.ranks.is_first and self._found is not None and self._found != self._contents():
            raise UserError(f"output {str(self.path)!r}: another run wrote there meanwhile; start again")

    def close(self) -> None:
        """Lets another process write."""
        self._lock.close()

    def _take_lock(self, *, create: bool) -> None:
        if self.ranks.is_first:
            self._lock.take(f"output {str(self.path)!r}", create=create)

    def _contents(self) -> list[str]:
        """Names that tell what has happened in the folder."""
        runs = self.path.iterdir() if self.path.is_dir() else ()
        names = (item.name for item in (*runs, *self.checkpoints()))
        return sorted(name for name in names if name != WriterLock.NAME and not name.startswith(".moetune-"))

    def _chosen(self, resume: str) -> Path:
        """The checkpoint that `--resume PATH` names, every byte of which is as it was written."""
        checkpoints, wanted = self.checkpoints(), expanded(resume).resolve()
        chosen = next((checkpoint for checkpoint in checkpoints if checkpoint.resolve() == wanted), None)
        if chosen is None:
            there = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
            raise UserError(
                f"--resume {resume!r} is no checkpoint of the run in {str(self.path)!r}; use auto, never or one of "
                f"{str(self.checkpoints_path)!r}, which has: {there}"
            )
        if reason := damage(chosen):
            raise UserError(f"checkpoint {str(chosen)!r} is damaged: {reason}; resume from another, or with auto")
        self._check_belongs(chosen)
        return chosen

    def create(
        self,
        config: RunConfig,
        checkpoint: Path | None,
        overwrite: bool,
        base: Base | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """Makes the folder and writes the resolved run file, the base unless the weights are random, and the inputs.

        On resume, what came after the checkpoint goes: those steps run again. So does what a kill left half-written.
        """
        self.ranks.barrier()  # all have read what is there
        if self.ranks.is_first:
            self._create(config, checkpoint, overwrite, base, inputs)
        self.ranks.barrier()

    def _create(
        self, config: RunConfig, checkpoint: Path | None, overwrite: bool, base: Base | None, inputs: Inputs | None
    ) -> None:
        step = 0 if checkpoint is None else step_of(checkpoint)
        with self._writing():
            self.checkpoints_path.mkdir(parents=True, exist_ok=True)
            self._own(*_WRITTEN)
            self._refuse_foreign(step)
            self.remove_leftovers()
            for later in self.checkpoints():
                if step_of(later) > step:
                    self._discard(later)
            if overwrite:  # the run file last: a kill before leaves a run
                for name in sorted(path for path in self._ledger.paths if "/" not in path and path != RUN_FILE):
                    (self.path / name).unlink(missing_ok=True)
            self._write(RUN_FILE, config.to_yaml())
            if base is not None:
                self.write_base(base)
            if inputs is not None:
                self._write(INPUTS_FILE, sealed(asdict(inputs)))
            kept = "" if checkpoint is None else (checkpoint / self.metrics_file.name).read_text(encoding="utf-8")
            self._write(self.metrics_file.name, kept)

    def remove_leftovers(self) -> None:
        """Removes checkpoints that a kill left half-written, or half-removed, and files that it left aside."""
        for leftover in self.checkpoints_path.glob(".step-*"):
            if self._is_ours(leftover):
                shutil.rmtree(leftover)
        for name in _WRITTEN[len(_FILES) :]:
            if name in self._ledger.paths:
                (self.path / name).unlink(missing_ok=True)

    def own(self, name: str) -> None:
        """Notes a file that a command is about to write into the folder.

        Raises:
            UserError: there is one of that name that moetune did not write, or it cannot be noted.
        """
        self._ledger = Ledger(self.path)
        if name not in self._ledger.paths:
            refuse_taken(self.path / name)
        if self._is_run():
            with self._writing():
                self._own(name)

    def _own(self, *names: str) -> None:
        self._ledger.add("run", *names, *(self._ours() - self._ledger.paths))

    def _ours(self) -> set[str]:
        """The paths that are this run's. One that has no ledger is known by its seals."""
        if self._ledger.kind is not None:
            return self._ledger.paths
        return (
            {*_FILES}
            | {
                f"checkpoints/{checkpoint.name}/{name}"
                for checkpoint in self.checkpoints()
                for name in sealed_files(checkpoint)
            }
            if self._is_run()
            else set()
        )

    def _is_ours(self, folder: Path) -> bool:
        """Whether a folder of `checkpoints` is one that is written, or removed."""
        return f"checkpoints/{folder.name}" in self._ledger.paths and not folder.is_symlink()

    def _foreign(self, checkpoint: Path) -> Path | None:
        """Something in the folder of a checkpoint that is not this run's."""
        prefix = f"checkpoints/{checkpoint.name}/"
        return foreign_in(checkpoint, {path.removeprefix(prefix) for path in self._ours() if path.startswith(prefix)})

    def _refuse_foreign(self, step: int) -> None:
        """Raises `UserError` if something that is not this run's is where it will write after a step."""
        ours = self._ours()
        in_the_way = [self.path / name for name in _WRITTEN if name not in ours and os.path.lexists(self.path / name)]
        for item in sorted(self.checkpoints_path.glob("*step-*")):
            if re.fullmatch(r"\.step-\d+", item.name) and not self._is_ours(item):
                in_the_way.append(item)
            elif re.fullmatch(r"step-\d+", item.name) and step_of(item) > step and (found := self._foreign(item)):
                in_the_way.append(found)
        if in_the_way:
            raise UserError(
                f"output {str(self.path)!r}: {str(in_the_way[0])!r} is in the way, and nothing says that this run "
                "wrote it; move it away, or choose another output"
            )

    def _write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text, aside=aside_of(self.path / name))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(f"output {str(self.path)!r} cannot be written: {error.strerror or error}{where}") from error

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = (path for path in self.checkpoints_path.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
        return sorted(found, key=step_of)

    def newest_whole(self, *, hold: bool = False) -> Path | None:
        """The newest checkpoint of which every byte is as it was written; None if there is none.

        Args:
            hold: a run that goes on in this folder shall not remove it as long as this object is there.

        Raises:
            UserError: there are some, and all are damaged; or the run file is not the one that it was written with.
        """
        self.damaged = []
        there = self.checkpoints()
        for checkpoint in reversed(there):
            if hold:
                with suppress(OSError):  # it has gone by now, or its file system has no locks
                    self._read = lock(checkpoint / MANIFEST, "rb", shared=True)
            reason = damage(checkpoint)
            if reason is None:
                self._check_belongs(checkpoint)
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
                if self._is_ours(aside):
                    shutil.rmtree(aside, ignore_errors=True)
                _refuse(aside)
                self._own(f"checkpoints/{aside.name}")
                aside.mkdir(parents=True)
            self.ranks.barrier()
            yield aside
            self.ranks.barrier()
            if first:
                for file in (self.path / RUN_FILE, self.path / INPUTS_FILE, self.metrics_file):
                    if file != self.path / INPUTS_FILE or file.is_file():
                        shutil.copyfile(file, aside / file.name)
                write_manifest(aside, step)
                sync(self.metrics_file)
                settle(aside)
                _refuse(final)
                self._own(*(f"checkpoints/{final.name}/{file.relative_to(aside)}" for file in files_in(aside)))
                aside.rename(final)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            if first and self._is_ours(aside):
                shutil.rmtree(aside, ignore_errors=True)
            free, reason = shutil.disk_usage(self.path).free, refused(error)
            if free > needed and reason is None:
                raise
            last = [checkpoint.name for checkpoint in self.checkpoints()][-1:] or ["none yet"]
            why = (
                f"the disk of {str(self.path)!r} is full: a checkpoint needs {needed:,} bytes and {free:,} are free"
                if free <= needed
                else f"a checkpoint cannot be written to {str(self.checkpoints_path)!r}: {reason}"
            )
            raise UserError(
                f"step {step}: {why}. The last complete one is {last[0]}; "
                f"{'free some space' if free <= needed else 'mend that'} and go on with --resume auto"
            ) from error
        if not first:
            return
        sync(self.checkpoints_path)
        for old in self.checkpoints()[:-keep]:
            with suppress(OSError):  # what is being read goes with the next one
                manifest = None if self._foreign(old) else lock(old / MANIFEST, "r+b")
                if manifest is not None:
                    with manifest:
                        self._discard(old)

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
        if self.ranks.is_first:
            with self._writing():
                self._own(BASE_FILE, f".{BASE_FILE}")
                self._write(BASE_FILE, sealed(base.to_json()))

    def base(self) -> Base | None:
        """What the run noted of its base; None if the file is missing.

        Raises:
            UserError: the file is damaged.
        """
        file = self.path / BASE_FILE
        what = f"{str(file)!r}, which says what the run was trained on,"
        remedy = (
            "put back what it was, or, if model.path is that still, delete it: moetune train "
            f"{self.path / RUN_FILE} --resume auto notes it anew"
        )
        return read_sealed(file, Base, what, remedy) if os.path.lexists(file) else None

    def inputs(self, checkpoint: Path | None = None) -> Inputs | None:
        """What the run noted of its inputs, in its folder or in a checkpoint; None if the file is missing.

        Raises:
            UserError: the file is damaged.
        """
        file = (checkpoint or self.path) / INPUTS_FILE
        remedy = "copy it back from a checkpoint"
        return read_sealed(file, Inputs, remedy=remedy) if os.path.lexists(file) else None

    def write_memory(self, record: dict[str, Any]) -> None:
        """Writes `memory.json`: predicted beside measured, and how many tokens each expert received."""
        if not self.ranks.is_first:
            return
        with suppress(OSError):  # a run can do without it, and on a full disk another error says so
            self._write(MEMORY_FILE, json.dumps(record) + "\n")

    def write_out_of_memory(self, found: dict[str, Any]) -> None:
        """Writes `out_of_memory.json`: what was there when memory ran out."""
        if self.ranks.is_first:
            with suppress(OSError):
                self._write(OUT_OF_MEMORY_FILE, json.dumps(found, indent=2) + "\n")

    def metrics(self) -> list[MetricsLine]:
        """Every whole line of `metrics.jsonl`; raises `UserError` as `parse_metrics`.

        A file that does not begin as the newest checkpoint has it was damaged: then the lines are the checkpoint's.
        """
        text = self.metrics_file.read_bytes() if self.metrics_file.is_file() else b""
        for checkpoint in self.checkpoints()[-1:]:
            known = checkpoint / self.metrics_file.name
            if known.is_file() and not text.startswith(whole := known.read_bytes()) and damage(checkpoint) is None:
                text = whole
        return parse_metrics(text, self.metrics_file)

    def _is_occupied(self) -> bool:
        """Whether anything is in the folder, beyond what a run leaves that was killed in its first instant."""
        first = {self.checkpoints_path.name, WriterLock.NAME, Ledger.NAME, *({f".{RUN_FILE}"} & self._ledger.paths)}
        return self.path.exists() and (
            any(item.name not in first for item in self.path.iterdir())
            or (self.checkpoints_path.exists() and any(self.checkpoints_path.iterdir()))
        )

    def _is_run(self) -> bool:
        """Whether it holds a run: by its ledger, else by what only a run has noted. Names alone do not make it one."""
        if not (self.path / RUN_FILE).is_file() or not self.checkpoints_path.is_dir():
            return False
        try:
            return self._ledger.kind == "run" or (self._ledger.kind is None and self.inputs() is not None)
        except UserError:
            return False

    def _discard(self, checkpoint: Path) -> None:
        aside = checkpoint.with_name(f".{checkpoint.name}")
        self._own(f"checkpoints/{aside.name}")
        checkpoint.rename(aside)
        shutil.rmtree(aside)

    def _check_writable(self) -> None:
        where = self.path
        try:
            where = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
            probe = where / f".moetune-{secrets.token_hex(8)}"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise UserError(
                f"output {str(self.path)!r} cannot be written: {error.strerror} ({where}); choose another output"
            ) from None

    def _check_belongs(self, checkpoint: Path) -> None:
        """Compares run and run file with the checkpoint's own, which are sealed, but for what may change on resume."""
        its, mine = self.inputs(checkpoint), self.inputs()
        if its is not None and mine is None:
            raise UserError(f"{str(self.path / INPUTS_FILE)!r} is missing; copy it back from {str(checkpoint)!r}")
        if its is not None and mine is not None and its.run != mine.run:
            raise UserError(f"checkpoint {str(checkpoint)!r} is of another run than {str(self.path)!r}; move it away")
        if not (checkpoint / RUN_FILE).is_file() or not (self.path / RUN_FILE).is_file():
            return
        before = settings(checkpoint / RUN_FILE)
        if changed := changes(before, settings(self.path / RUN_FILE), FREE_ON_EXPORT):
            raise UserError(
                f"{str(self.path / RUN_FILE)!r} was changed after {checkpoint.name} was written:\n  "
                + "\n  ".join(changed)
                + f"\nCopy it back from {str(checkpoint)!r}"
            )

    def _check_same_run(self, config: RunConfig) -> None:
        if changed := changes(settings(self.path / RUN_FILE), settings(config), FREE_ON_RESUME):
            raise UserError(
                f"the run in {str(self.path)!r} cannot be resumed with another run file:\n  "
                + "\n  ".join(changed)
                + "\nSet these back, or choose another output"
            )


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def _refuse(path: Path) -> None:
    """Raises `OSError` if something has that name by now."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
