"""Outputs that appear when complete: written in a folder beside, then renamed.

The folder of the output `NAME` is `.NAME.moetune`. It holds `of.json`, which says that moetune made it and what for;
a lock while its process lives; `new`, the output as far as it is written; and `old`, what it replaces. A killed process
leaves the folder behind, and the next that writes the same output removes it, or goes on with it.
"""

import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from moetune.errors import UserError
from moetune.files import (
    ASIDE,
    Ledger,
    expanded,
    foreign_in,
    free_bytes,
    lock,
    names_in,
    refuse_in_checkpoint,
    refused,
    settle,
    sync,
    write_whole,
)

NEW, _OLD, _OF = "new", "old", "of.json"


def aside_of(out: Path) -> Path:
    """Return the folder beside an output in which it is written: `.NAME.moetune`.

    Raises `UserError` if the output is the working directory or holds it, such as `.`: it cannot be replaced.
    """
    if out.is_dir() and Path.cwd().is_relative_to(out.resolve()):
        raise UserError(
            f"--out {str(out)!r} is or holds the folder that moetune runs in; give another, or run elsewhere"
        )
    return out.with_name(f".{out.name}.moetune")


def out_of(folder: Path) -> Path:
    """Return the output that is written in a folder, `aside_of` it."""
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".moetune"))


@contextmanager
def aside(out: Path, task: Mapping[str, Any] | None = None, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield the folder `aside_of(out)`, in which only this process writes; remove it at the end.

    What a killed process left there is removed first; an output that it had moved away is moved back.

    Args:
        task: all that the work depends on, as JSON values. If the body is interrupted, or raises an error, after it has
            written something, the folder stays, and a call with the same `task` finds it as it was; but not after a
            `UserError` in the first such call (bad input: none would get further). None: no call goes on with it.
        overwrite: remove also what a call with another `task` has begun.

    Raises:
        UserError: another process writes `out`; one with another `task` has begun to; or there is something else of
            this name.
        OSError: the folder cannot be written.
    """
    folder, what = aside_of(out), f"--out {str(out)!r}"
    if not is_ours(folder):
        raise UserError(f"{str(folder)!r}, in which {out.name!r} would be written, is not moetune's; move it away")
    folder.mkdir(parents=True, exist_ok=True)
    writer = WriterLock(folder)
    try:
        writer.take(what, create=True)
        begun = (_record(folder) or {}).get("of")
        goes_on = begun is not None and begun == task
        if begun is not None and not goes_on and not overwrite:
            raise UserError(
                f"{what} was begun with another model, other data or settings, and {str(folder)!r} holds what is done; "
                "give the same, remove that folder, or choose another"
            )
        if not goes_on:
            _clear(folder, out)
            _write_record(folder, task)
        stays = False
        try:
            yield folder
        except BaseException as error:
            stays = task is not None and (goes_on or not isinstance(error, UserError))
            stays = stays and any(item.is_file() and item.stat().st_size for item in _work(folder))
            raise
        finally:
            if not stays:
                with suppress(OSError):  # the next call removes it
                    _clear(folder, out)
    finally:
        writer.close()
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def publish(out: Path) -> None:
    """Rename the `new` file or folder in `aside_of(out)` to `out`, after it is on disk; what is there is replaced.

    From here on no call goes on with the folder.
    """
    folder = aside_of(out)
    settle(folder / NEW)
    _write_record(folder, None)
    if out.is_dir():
        out.rename(folder / _OLD)
    (folder / NEW).rename(out)
    sync(out.parent)


@contextmanager
def new_folder(
    out: Path, overwrite: bool, needed: int = 0, *, kind: str = "export", task: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Yield an empty temporary folder to write into; rename it to `out` when the body ends without an error.

    If the body raises, `out` is as it was. A ledger in the folder lists its files.

    Args:
        overwrite: replace `out` if it holds an earlier output of the same kind.
        needed: bytes that will be written, to check the free space of the disk.
        kind: what is written, such as "export", for the ledger and messages.
        task: as in `aside`; with it the folder may hold what an interrupted call has written.

    Raises:
        UserError: `out` is occupied or cannot be written, or its disk is too small; or a file that the body reads
            cannot be read; or as `aside`.
    """
    out = expanded(out).absolute()
    refuse_unfit(out, overwrite, needed, kind)
    with writing(out), aside(out, task, overwrite=overwrite) as folder:
        new = folder / NEW
        new.mkdir(exist_ok=True)
        yield new
        Ledger(new).add(kind, *(str(file.relative_to(new)) for file in new.rglob("*") if not file.is_dir()))
        publish(out)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise what the system refuses in the body as `UserError`, which names the output `out` and the file that failed;
    also if `out` is in a checkpoint of a run."""
    refuse_in_checkpoint(out)
    try:
        yield
    except (OSError, SafetensorError) as error:
        if (reason := refused(error)) is None:  # transformers also raises OSError for other errors
            raise
        raise UserError(f"--out {str(out)!r} was not written: {reason}") from error


def sweep(out: Path) -> None:
    """Remove what a killed process left beside an output, unless a call can go on with it."""
    if aside_of(out).is_dir():
        with suppress(UserError, OSError), aside(out):
            pass


def is_occupied(out: Path, overwrite: bool) -> bool:
    """Return whether the output folder of `--out` has entries, to be replaced; False if it is empty or missing.

    Raises:
        UserError: `out` is a link, a mount point or not a folder; or it has entries, and `overwrite` is False.
    """
    refuse_in_checkpoint(out)
    sweep(out)
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out {str(out)!r} exists and is not a folder")
    if os.path.ismount(out):  # nothing can be renamed to it
        raise UserError(f"--out {str(out)!r} is where a disk is mounted; give a folder in it")
    if not out.exists() or not any(out.iterdir()):
        return False
    if not overwrite:
        raise UserError(f"--out {str(out)!r} is not empty; replace what is there with --overwrite, or choose another")
    return True


def refuse_unfit(out: Path, overwrite: bool, needed: int = 0, kind: str = "export") -> None:
    """Raise `UserError` if the folder `out` is not new or empty, or its disk has fewer than `needed` bytes free.

    With `overwrite`, `out` may hold an earlier output of the same kind, and nothing else.
    """
    out = expanded(out).absolute()
    if is_occupied(out, overwrite):
        ledger = Ledger(out)
        if ledger.kind != kind:
            raise UserError(
                f"--out {str(out)!r} holds no {kind}, or one of an earlier version, which has no {Ledger.NAME}; "
                "choose another"
            )
        if foreign := foreign_in(out, {Ledger.NAME, *ledger.paths}):
            raise UserError(f"--out {str(out)!r}: {str(foreign)!r} is not part of the {kind} there; move it away")
    if (free := free_bytes(out)) < needed:
        raise UserError(f"--out {str(out)!r}: {needed:,} bytes are needed there and {free:,} are free")


def is_ours(folder: Path) -> bool:
    """Return whether moetune made a folder in which an output is written, or it can: there is none, or a process was
    killed before it wrote anything there."""
    if not os.path.lexists(folder):
        return True
    if folder.is_symlink() or not folder.is_dir():
        return False
    return _record(folder) is not None or all(
        name == WriterLock.NAME or ASIDE.fullmatch(name) for name in names_in(folder)
    )


def _record(folder: Path) -> dict[str, Any] | None:
    """Return what `of.json` says: `{"written by moetune": "aside", "of": …}`; None if it is not there, or not ours."""
    with suppress(OSError, ValueError, RecursionError):
        file = folder / _OF
        record = json.loads(file.read_bytes()) if file.is_file() and not file.is_symlink() else None
        if isinstance(record, dict) and record.get("written by moetune") == "aside":
            return record
    return None


def _write_record(folder: Path, task: Mapping[str, Any] | None) -> None:
    write_whole(folder / _OF, json.dumps({"written by moetune": "aside", "of": task}))


def _work(folder: Path) -> Iterator[Path]:
    """Yield what lies in the folder of an output, but its record and its lock."""
    return (item for item in folder.rglob("*") if item.relative_to(folder).parts[0] not in (_OF, WriterLock.NAME))


def _clear(folder: Path, out: Path) -> None:
    """Remove everything in the folder of `out` but the lock, its record last; if `out` is missing, first restore what
    was moved away for it."""
    if (folder / _OLD).exists() and not os.path.lexists(out):
        (folder / _OLD).rename(out)
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name not in (_OF, WriterLock.NAME):
            item.unlink()
    (folder / _OF).unlink(missing_ok=True)


class WriterLock:
    """A lock file `.lock` in a folder, which keeps out a second writing process.

    Call `take` before writing into the folder, and `close` at the end. The file names the process that holds the lock.
    If it is killed, the file stays and the lock ends.
    """

    NAME = ".lock"

    def __init__(self, folder: Path) -> None:
        self.file = folder / self.NAME
        self._held: IO[bytes] | None = None

    def take(self, what: str, *, create: bool) -> None:
        """Take the lock, unless it is held already; without `create`, only if there is a lock file.

        Messages name the folder `what`.

        Raises:
            UserError: another process holds the lock, locking fails, or a file of this name is not a lock of moetune.
        """
        if self._held is not None or not (create or self.file.exists()):
            return
        holder = "another process"
        try:
            self._held = lock(self.file, "a+b")
        except OSError as error:
            reason = f"{error.strerror or error} ({self.file})"
            raise UserError(f"{what} cannot be locked against a second writer: {reason}; choose another") from error
        if self._held is None:
            with suppress(OSError):
                holder = _writer(self.file.read_bytes()) or holder
            raise UserError(f"{what} is being written by {holder}; wait for it to end, or choose another")
        text = self._held.read()
        if text and _writer(text) is None:
            self._held.close()
            self._held = None
            raise UserError(f"{str(self.file)!r} exists and is not a lock file of moetune; move it away")
        self._held.seek(0)
        self._held.truncate(0)
        self._held.write(json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
        self._held.flush()

    def close(self) -> None:
        """Release the lock, if it is held, and remove its file."""
        if self._held is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)
            self._held.close()
            self._held = None


def _writer(text: bytes) -> str | None:
    """Return "process PID on HOST" from the text of a lock file; None if the text is something else."""
    try:
        writer = json.loads(text)
        return f"process {int(writer['process'])} on {str(writer['host'])[:80]}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
