"""Writes a run folder: checks at the start, lock, files, checkpoints.

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
    names_in,
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
from moetune.training.folder.manifest import damage, files_in, write_manifest
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
from moetune.training.same_run import BASE, FREE_ON_RESUME, Inputs, changed_settings

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
            with self._writing(), TemporaryFile(dir=nearest_existing(self.path)):
                pass
            self._lock.take(f"output {str(self.path)!r}", create=False)
        self._seen, self._ledger = self._names(), Ledger(self.path)
        # A run that was killed before it wrote its run file leaves an empty folder of checkpoints and the ledger.
        if set(self._seen) - {self.checkpoints_path.name, Ledger.NAME}:
            if self._ledger.kind != "run":
                raise UserError(
                    f"output {str(self.path)!r} exists and is not a run folder; choose another output (a copy of a run "
                    f"needs its {Ledger.NAME} too)"
                )
            lost = [part.name for part in (self.path / RUN_FILE, self.checkpoints_path) if not part.exists()]
            if lost and not overwrite:
                raise UserError(
                    f"output {str(self.path)!r} holds a run without {' and '.join(lost)}: copy it back, start again "
                    "with --overwrite, or choose another output"
                )
            if resume == "never" and not overwrite:
                refuse_existing_run(self.path)
        checkpoint = None
        if resume != "never":
            checkpoint = self.newest_whole() if resume == "auto" else self._chosen(resume)
            run_file = self.path / RUN_FILE
            free = FREE_ON_RESUME | (BASE if config.model.weights == "pretrained" else set())
            if run_file.exists() and (changed := changed_settings(run_file, config, free)):
                raise UserError(
                    f"the run in {str(self.path)!r} cannot be resumed with another run file:\n  "
                    + "\n  ".join(changed)
                    + "\nSet these back, or choose another output"
                )
        if checkpoint is not None:
            self.metrics_until(checkpoint)
        self._refuse_foreign(0 if checkpoint is None else step_of(checkpoint))
        return checkpoint

    def _chosen(self, resume: str) -> Path:
        """Return the folder that `--resume PATH` names; `UserError` if the checkpoint is damaged or of another run."""
        checkpoints, wanted = self.checkpoints(), expanded(resume).resolve()
        chosen = next((checkpoint for checkpoint in checkpoints if checkpoint.resolve() == wanted), None)
        if chosen is None:
            names = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
            raise UserError(
                f"--resume {resume!r} is no checkpoint of the run in {str(self.path)!r}; use auto, never or one of "
                f"{str(self.checkpoints_path)!r}, which has: {names}"
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
        """Return the sorted names in the folder and its folder of checkpoints, without lock and temporary files."""
        names = names_in(self.path) + names_in(self.checkpoints_path)
        return sorted(name for name in names if name != WriterLock.NAME and not ASIDE.fullmatch(name))

    def _foreign(self, checkpoint: Path) -> Path | None:
        """Return the path of a file in a checkpoint's folder that moetune has not written; None if there is none."""
        prefix = f"checkpoints/{checkpoint.name}/"
        ours = {path.removeprefix(prefix) for path in self._ledger.paths if path.startswith(prefix)}
        return foreign_in(checkpoint, ours)

    def _refuse_foreign(self, step: int) -> None:
        """Raise `UserError` if a run from `step` on would write to an existing path that moetune has not written."""
        files = [self.path / name for name in _FILES if name not in self._ledger.paths]
        foreign = [file for file in files if os.path.lexists(file)]
        foreign += [folder for folder in self._asides() if not is_ours(folder)]
        later = [checkpoint for checkpoint in self.checkpoints() if step_of(checkpoint) > step]
        foreign += [file for checkpoint in later if (file := self._foreign(checkpoint))]
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
        if not self.ranks.is_first:
            return
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock.take(f"output {str(self.path)!r}", create=True)
        if self._seen is not None and self._seen != self._names():
            raise UserError(f"output {str(self.path)!r}: another run wrote there meanwhile; start again")

    def close(self) -> None:
        """Release the lock, if it is held."""
        self._lock.close()

    def create(
        self,
        config: RunConfig,
        checkpoint: Path | None,
        overwrite: bool,
        base: Base | None,
        inputs: Inputs,
    ) -> None:
        """Write run file, `base.json` and `inputs.json`; begin or restore `metrics.jsonl`. Every rank must call this.

        Checkpoints after `checkpoint` are deleted, because those steps run again, and so are leftovers of a killed run.

        Args:
            config: the resolved configuration, written as `run.yaml`.
            checkpoint: the folder of the checkpoint to continue from; None for a new run.
            overwrite: whether to delete the other files of the run that is replaced.
            base, inputs: contents of `base.json`, which is not written if it is None, and of `inputs.json`.

        Raises:
            UserError: the run would replace a file that moetune has not written, or the folder cannot be written.
        """
        self.ranks.barrier()  # until all ranks have read the folder
        if self.ranks.is_first:
            step = 0 if checkpoint is None else step_of(checkpoint)
            with self._writing():
                self.checkpoints_path.mkdir(parents=True, exist_ok=True)
                self._ledger.add("run", *_FILES)
                self._refuse_foreign(step)
                self.remove_leftovers()
                for later in self.checkpoints():
                    if step_of(later) > step:
                        self._discard(later)
                if overwrite:  # replaces the run file last, so that a kill before leaves a run
                    for name in sorted(path for path in self._ledger.paths if "/" not in path and path != RUN_FILE):
                        (self.path / name).unlink(missing_ok=True)
                write_whole(self.path / RUN_FILE, config.to_yaml())
                if base is not None:
                    self.write_base(base)
                write_whole(self.path / INPUTS_FILE, sealed(asdict(inputs)))
                write_whole(self.metrics_file, b"" if checkpoint is None else self.metrics_until(checkpoint))
        self.ranks.barrier()

    def remove_leftovers(self) -> None:
        """Delete the temporary files, and the half-written and half-deleted checkpoints, of a killed run, on the first
        rank."""
        if not self.ranks.is_first:
            return
        for folder in self._asides():
            sweep(out_of(folder))
        for name in filter(ASIDE.fullmatch, names_in(self.path)):
            (self.path / name).unlink()

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
        if self._ledger.kind == "run":
            with self._writing():
                self._ledger.add("run", name)

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
                write_whole(self.path / BASE_FILE, sealed(base.to_json()))

    def write_if_possible(self, name: str, text: str) -> None:
        """Write `text` into the file `name` of the run folder, on the first rank; training does not need the file.

        A disk error is ignored, because the next checkpoint reports it.
        """
        if self.ranks.is_first:
            with suppress(OSError):
                write_whole(self.path / name, text)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`, on the first rank; raise `UserError` if the file cannot be written."""
        if self.ranks.is_first:
            with self._writing(), self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    @contextmanager
    def new_checkpoint(self, step: int, keep: int, needed: int = 0, best: int | None = None) -> Iterator[Path]:
        """Context manager: yield a temporary folder in which each rank writes its part; then make it a checkpoint.

        Every rank must enter it. After the body the first rank adds copies of the run's files and the manifest, renames
        the folder to `step-N`, and deletes old checkpoints, except those that hold a file of the user.

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
                        shutil.copyfile(self.path / name, new / name)
                    sync(self.metrics_file)
                    write_manifest(new, step, self.metrics_file)
                    refuse_existing(final)
                    files = (f"checkpoints/{final.name}/{file.relative_to(new)}" for file in files_in(new))
                    self._ledger.add("run", *files)
                    publish(final)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            free, reason = free_bytes(self.path), refused(error)
            if free > needed and reason is None:
                raise
            last = [checkpoint.name for checkpoint in self.checkpoints()][-1:] or ["none yet"]
            raise UserError(
                f"step {step}: a checkpoint cannot be written to {str(self.checkpoints_path)!r}: "
                f"{reason or 'no space'}; it needs {needed:,} bytes and {free:,} are free. The last complete one is "
                f"{last[0]}; free some space, or remove another cause, and continue with --resume auto"
            ) from error
        if first:
            sync(self.checkpoints_path)
            for old in [checkpoint for checkpoint in self.checkpoints()[:-keep] if step_of(checkpoint) != best]:
                with suppress(OSError):
                    if not self._foreign(old):
                        self._discard(old)

    def _discard(self, checkpoint: Path) -> None:
        """Rename a checkpoint, then delete it, so that a kill leaves no half checkpoint under its name."""
        with aside(checkpoint) as folder:
            checkpoint.rename(folder / "deleted")
