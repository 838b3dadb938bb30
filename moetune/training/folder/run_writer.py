"""Writes a run folder: checks that a run may start in it, locks it, writes its files, adds and deletes checkpoints.

The ledger, `.moetune` in the run folder, lists the paths that moetune has written. Any other file is the user's, and is
neither replaced nor deleted. A file or checkpoint appears when it is complete (`moetune.atomic`). On
resume `metrics.jsonl` is cut to what it held at the checkpoint, because later steps run again.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from moetune.atomic import NEW, WriterLock, aside, aside_of, is_ours, out_of, publish, sweep
from moetune.config.load import refuse_existing_run
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.files import (
    ASIDE,
    Ledger,
    expanded,
    foreign_in,
    free_bytes,
    lock,
    nearest_existing,
    refuse_existing,
    refuse_in_checkpoint,
    refuse_taken,
    refused,
    sync,
    write_whole,
)
from moetune.json_files import sealed
from moetune.models.hub.fingerprint import Base
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.training.folder.manifest import MANIFEST, damage, files_in, sealed_files, write_manifest
from moetune.training.folder.run_folder import (
    BASE_FILE,
    INPUTS_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    OUT_OF_MEMORY_FILE,
    RUN_FILE,
    RunFolder,
    step_of,
)
from moetune.training.same_run import FREE_ON_RESUME, Inputs, changed_settings

_FILES = (RUN_FILE, BASE_FILE, INPUTS_FILE, METRICS_FILE, MEMORY_FILE, OUT_OF_MEMORY_FILE)


class RunWriter(RunFolder):
    """The run folder of a run that writes to it.

    Call `check`, then `lock`, then `create`. Nothing is written before `lock`, which only one process at a time can
    hold, until `close`. Only the first rank writes files; in a checkpoint every rank writes its part.

    Args:
        path: the run folder; it need not exist.
    """

    def __init__(self, path: Path, ranks: Ranks = SINGLE_RANK) -> None:
        super().__init__(path)
        self.ranks = ranks
        self._lock, self._ledger = WriterLock(self.path), Ledger(self.path)
        self._seen: list[str] | None = None  # the names in the folder when `check` ran

    # --- May a run start here, and from what? -------------------------------------------------------------------------

    def check(self, config: RunConfig, resume: str, overwrite: bool) -> Path | None:
        """Check that a run may start in this folder; return the checkpoint that it continues from, None for a new run.

        The contents of the folder are not changed. If a lock file is there already, its lock is taken.

        Args:
            config: the configuration of the run that would start, compared with that of the run to resume.
            resume: `never`, `auto` (the newest checkpoint, if there is one) or the path of a checkpoint folder.
            overwrite: whether a run in the folder may be replaced; excludes `resume`.

        Raises:
            UserError: the folder cannot be written, or another process writes to it; it holds other files and no run;
                it holds a run, and neither `resume` nor `overwrite` is given; the run to resume has other settings or
                only damaged checkpoints; or a file of the user is where the run will write.
        """
        if resume != "never" and overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        refuse_in_checkpoint(self.path)
        if self.ranks.is_first:
            self._check_writable()
        self._take_lock(create=False)
        self._seen, self._ledger = self._names(), Ledger(self.path)
        is_marked = self._ledger.kind == "run"
        is_run = self._is_run() or (overwrite and is_marked)
        if self._is_occupied():
            if not is_run:
                if is_marked and (self.path / RUN_FILE).is_file():
                    raise UserError(
                        f"output {str(self.path)!r} holds a run whose folder of checkpoints is gone: copy it back, "
                        "start again with --overwrite, or choose another output"
                    )
                if is_marked and (checkpoints := self.checkpoints()):
                    raise UserError(
                        f"output {str(self.path)!r} has checkpoints and no {RUN_FILE}: copy it back from "
                        f"{str(checkpoints[-1])!r}, or choose another output"
                    )
                raise UserError(f"output {str(self.path)!r} exists and is not a run folder; choose another output")
            if resume == "never":
                if not overwrite:
                    refuse_existing_run(self.path)
                if not is_marked:
                    raise UserError(
                        f"output {str(self.path)!r} holds a run without {Ledger.NAME}, the list of what moetune wrote: "
                        "it is of an earlier version, or was copied without that file. Continue it with --resume auto, "
                        "which notes it, or choose another output"
                    )
        checkpoint = None
        if resume != "never":
            checkpoint = self.newest_whole() if resume == "auto" else self._chosen(resume)
            if is_run and (changed := changed_settings(self.path / RUN_FILE, config, FREE_ON_RESUME)):
                raise UserError(
                    f"the run in {str(self.path)!r} cannot be resumed with another run file:\n  "
                    + "\n  ".join(changed)
                    + "\nSet these back, or choose another output"
                )
        if checkpoint is not None:
            self._metrics_until(checkpoint)
        self._refuse_foreign(0 if checkpoint is None else step_of(checkpoint))
        return checkpoint

    def _metrics_until(self, checkpoint: Path) -> bytes:
        text = self.metrics_file.read_bytes() if self.metrics_file.is_file() else b""
        return self.metrics_until(checkpoint, text)

    def _check_writable(self) -> None:
        """Raise `UserError` unless a file can be made in the run folder, or in its nearest parent that exists."""
        where = self.path
        try:
            where = nearest_existing(self.path)
            with TemporaryFile(dir=where):
                pass
        except OSError as error:
            raise UserError(
                f"output {str(self.path)!r} cannot be written: {error.strerror} ({where}); choose another output"
            ) from None

    def _chosen(self, resume: str) -> Path:
        """Return the folder that `--resume PATH` names; `UserError` if the checkpoint is damaged or of another run."""
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
        self.refuse_foreign_checkpoint(chosen)
        return chosen

    def refuse_full_disk(self, needed: int) -> None:
        """Raise `UserError` if fewer than `needed` bytes are free on the disk of the run folder."""
        if (free := free_bytes(self.path)) < needed:
            raise UserError(
                f"output {str(self.path)!r}: checkpoints need {needed:,} bytes there and {free:,} are free; free some, "
                "lower train.keep_checkpoints, or choose another output"
            )

    # --- Whose is what is there? --------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """Return the sorted names of files and checkpoints, without lock and temporary files."""
        runs = self.path.iterdir() if self.path.is_dir() else ()
        names = (item.name for item in (*runs, *self.checkpoints()))
        return sorted(name for name in names if name != WriterLock.NAME and not ASIDE.fullmatch(name))

    def _is_occupied(self) -> bool:
        """Return whether the folder has contents, other than those that a run leaves if it is killed before it writes
        its run file."""
        first = {self.checkpoints_path.name, WriterLock.NAME, Ledger.NAME}
        return self.path.exists() and (
            any(item.name not in first and not ASIDE.fullmatch(item.name) for item in self.path.iterdir())
            or (self.checkpoints_path.exists() and any(self.checkpoints_path.iterdir()))
        )

    def _is_run(self) -> bool:
        """Return whether there is a run: run file, checkpoints folder, and a ledger or else a valid `inputs.json`."""
        if not (self.path / RUN_FILE).is_file() or not self.checkpoints_path.is_dir():
            return False
        try:
            return self._ledger.kind == "run" or (self._ledger.kind is None and self.inputs() is not None)
        except UserError:
            return False

    def _ours(self) -> set[str]:
        """Return the relative paths that moetune has written: those in the ledger.

        For a run without a ledger they are the usual files of a run, and the files in its checkpoints' manifests.
        """
        if self._ledger.kind is not None or not self._is_run():
            return self._ledger.paths
        sealed = {f"checkpoints/{folder.name}/{name}" for folder in self.checkpoints() for name in sealed_files(folder)}
        return {*_FILES, *sealed}

    def _foreign(self, checkpoint: Path) -> Path | None:
        """Return the path of a file in a checkpoint's folder that moetune has not written; None if there is none."""
        prefix = f"checkpoints/{checkpoint.name}/"
        return foreign_in(checkpoint, {path.removeprefix(prefix) for path in self._ours() if path.startswith(prefix)})

    def _refuse_foreign(self, step: int) -> None:
        """Raise `UserError` if a run from `step` on would write to an existing path that moetune has not written."""
        ours = self._ours()
        foreign = [self.path / name for name in _FILES if name not in ours and os.path.lexists(self.path / name)]
        foreign += [folder for folder in self._asides() if not is_ours(folder)]
        later = [checkpoint for checkpoint in self.checkpoints() if step_of(checkpoint) > step]
        foreign += [found for checkpoint in later if (found := self._foreign(checkpoint))]
        if foreign:
            raise UserError(
                f"output {str(self.path)!r}: {str(foreign[0])!r} already exists and was not written by this "
                "run; move it away, or choose another output"
            )

    # --- The folder's own files ---------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Make the folder if it does not exist, and lock it against other writers until `close`.

        Raises:
            UserError: another process holds the lock, or has written to the folder since `check`; or the folder cannot
                be made.
        """
        with self._writing():
            if self.ranks.is_first:
                self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock(create=True)
        if self.ranks.is_first and self._seen is not None and self._seen != self._names():
            raise UserError(f"output {str(self.path)!r}: another run wrote there meanwhile; start again")

    def close(self) -> None:
        """Release the lock, if it is held."""
        self._lock.close()

    def _take_lock(self, *, create: bool) -> None:
        """Take the lock on the first rank; without `create`, only if there is a lock file."""
        if self.ranks.is_first:
            self._lock.take(f"output {str(self.path)!r}", create=create)

    def create(
        self,
        config: RunConfig,
        checkpoint: Path | None,
        overwrite: bool,
        base: Base | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """Write run file, `base.json` and `inputs.json`; begin or restore `metrics.jsonl`. Every rank must call this.

        Checkpoints after `checkpoint` are deleted, because those steps run again, and so are leftovers of a killed run.

        Args:
            config: the resolved configuration, written as `run.yaml`.
            checkpoint: the folder of the checkpoint to continue from; None for a new run.
            overwrite: whether to delete the other files of the run that is replaced.
            base, inputs: contents of `base.json` and `inputs.json`; without a value the file is not written.

        Raises:
            UserError: the run would replace a file that moetune has not written, or the folder cannot be written.
        """
        self.ranks.barrier()  # until all ranks have read the folder
        if self.ranks.is_first:
            step = 0 if checkpoint is None else step_of(checkpoint)
            with self._writing():
                self.checkpoints_path.mkdir(parents=True, exist_ok=True)
                self._own(*_FILES)
                self._refuse_foreign(step)
                self.remove_leftovers()
                for later in self.checkpoints():
                    if step_of(later) > step:
                        self._discard(later)
                if overwrite:  # replaces the run file last, so that a kill before leaves a run
                    for name in sorted(path for path in self._ledger.paths if "/" not in path and path != RUN_FILE):
                        (self.path / name).unlink(missing_ok=True)
                self._write(RUN_FILE, config.to_yaml())
                if base is not None:
                    self.write_base(base)
                if inputs is not None:
                    self._write(INPUTS_FILE, sealed(asdict(inputs)))
                self._write(METRICS_FILE, b"" if checkpoint is None else self._metrics_until(checkpoint))
        self.ranks.barrier()

    def remove_leftovers(self) -> None:
        """Delete the temporary files, and the half-written and half-deleted checkpoints, of a killed run, on the first
        rank."""
        if not self.ranks.is_first:
            return
        for folder in self._asides():
            sweep(out_of(folder))

    def _asides(self) -> list[Path]:
        """Return the folders, and whatever else has such a name, in which checkpoints are written or deleted."""
        return sorted(self.checkpoints_path.glob(".step-*.moetune"))

    def own(self, name: str) -> None:
        """Add `name` to the ledger: a file of the run folder that a command is about to write, and may replace later.

        If the folder holds no run, the name is only checked.

        Raises:
            UserError: there is a file of that name that moetune has not written, or the ledger cannot be written.
        """
        self._ledger = Ledger(self.path)
        if name not in self._ledger.paths:
            refuse_taken(self.path / name)
        if self._is_run():
            with self._writing():
                self._own(name)

    def _own(self, *names: str) -> None:
        """Add relative paths to the ledger; if the run has no ledger yet, begin it with the files of `_ours`."""
        self._ledger.add("run", *names, *(self._ours() - self._ledger.paths))

    def _write(self, name: str, text: str | bytes) -> None:
        write_whole(self.path / name, text)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise an `OSError` of the body as a `UserError`."""
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise UserError(f"output {str(self.path)!r} cannot be written: {error.strerror or error}{where}") from error

    def write_base(self, base: Base) -> None:
        """Write `base.json`: the base's name and fingerprint (SHA-256 of each file), with a seal."""
        if self.ranks.is_first:
            with self._writing():
                self._own(BASE_FILE)
                self._write(BASE_FILE, sealed(base.to_json()))

    def write_if_possible(self, name: str, text: str) -> None:
        """Write `text` into the file `name` of the run folder, on the first rank; training does not need the file.

        A disk error is ignored, because the next checkpoint reports it.
        """
        if self.ranks.is_first:
            with suppress(OSError):
                self._write(name, text)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`, on the first rank; raise `UserError` if the file cannot be written."""
        if not self.ranks.is_first:
            return
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise UserError(
                f"{str(self.metrics_file)!r} cannot be written: {error.strerror}; then continue with --resume auto"
            ) from error

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    @contextmanager
    def new_checkpoint(self, step: int, keep: int, needed: int = 0, best: int | None = None) -> Iterator[Path]:
        """Context manager: yield a temporary folder in which each rank writes its part; then make it a checkpoint.

        Every rank must enter it. After the body the first rank adds copies of the run's files and the manifest, renames
        the folder to `step-N`, and deletes old checkpoints, except those that are being read (`RunFolder.newest_whole`)
        or hold a file of the user.

        Args:
            keep: number of checkpoints to keep, this one included.
            needed: bytes that will be written, to tell a full disk from other errors.
            best: the step of a checkpoint that is not deleted, such as the one with the lowest held-out loss.

        Raises:
            UserError: the disk is full, or the system refused to write. The temporary folder is deleted then, and
                earlier checkpoints are as they were.
        """
        final = self.checkpoints_path / f"step-{step}"
        new, first = aside_of(final) / NEW, self.ranks.is_first
        try:
            with aside(final) if first else nullcontext():
                if first:
                    refuse_existing(final)
                    new.mkdir()
                self.ranks.barrier()
                yield new
                self.ranks.barrier()
                if first:
                    for name in (RUN_FILE, INPUTS_FILE):
                        if name != INPUTS_FILE or (self.path / name).is_file():
                            shutil.copyfile(self.path / name, new / name)
                    sync(self.metrics_file)
                    write_manifest(new, step, self.metrics_file)
                    refuse_existing(final)
                    self._own(*(f"checkpoints/{final.name}/{file.relative_to(new)}" for file in files_in(new)))
                    publish(final)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            free, reason = free_bytes(self.path), refused(error)
            if free > needed and reason is None:
                raise
            last = [checkpoint.name for checkpoint in self.checkpoints()][-1:] or ["none yet"]
            why = f"a checkpoint cannot be written to {str(self.checkpoints_path)!r}: {reason}"
            remedy = "remove the cause"
            if free <= needed:
                why = (
                    f"the disk of {str(self.path)!r} is full: a checkpoint needs {needed:,} bytes and {free:,} are free"
                )
                remedy = "free some space"
            raise UserError(
                f"step {step}: {why}. The last complete one is {last[0]}; {remedy} and continue with --resume auto"
            ) from error
        if first:
            sync(self.checkpoints_path)
            for old in [checkpoint for checkpoint in self.checkpoints()[:-keep] if step_of(checkpoint) != best]:
                with suppress(OSError):  # a checkpoint that is locked by a reader is deleted after a later step
                    manifest = None if self._foreign(old) else lock(old / MANIFEST, "r+b")
                    if manifest is not None:
                        with manifest:
                            self._discard(old)

    def _discard(self, checkpoint: Path) -> None:
        """Rename a checkpoint, then delete it, so that a kill leaves no half checkpoint under its name."""
        with aside(checkpoint) as folder:
            checkpoint.rename(folder / "deleted")
