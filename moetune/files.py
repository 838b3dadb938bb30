"""Files that others may rely on: written whole, with the permissions that the umask says, by one writer at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO

from moetune.errors import UserError, shown

_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # bytes, as Linux and macOS have it; a path needs room for what is in it


def check_path(text: str) -> Path:
    """A path as a user writes it, `~` expanded.

    Raises:
        ValueError: no file can be called that.
    """
    if "\0" in text:
        raise ValueError("it holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, or a byte, which is no character") from None
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no user {text.split('/')[0][1:]!r}") from None
    if len(os.fsencode(path)) > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise ValueError(f"a name may have {_LONGEST_NAME} bytes, and a path {_LONGEST_PATH:,}")
    return path


def expanded(path: Path | str) -> Path:
    """The same, for paths that come from elsewhere than a run file; raises `UserError`."""
    try:
        return check_path(str(path))
    except ValueError as error:
        raise UserError(f"{shown(str(path))} cannot be a path: {error}") from None


def names_in(folder: Path) -> list[str]:
    """Of what is in it; nothing where it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_occupied(out: Path, overwrite: bool) -> bool:
    """Whether a folder that is to be written holds something; raises `UserError` if that may not be overwritten."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out {str(out)!r} exists and is not a folder")
    if not out.exists() or not any(out.iterdir()):
        return False
    if not overwrite:
        raise UserError(f"--out {str(out)!r} is not empty; replace what is there with --overwrite, or choose another")
    return True


def sync(path: Path) -> None:
    """Makes sure that what was written survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    aside = aside_of(path)
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    aside.rename(path)


def aside_of(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}")


def settle(path: Path) -> None:
    """Syncs a file, or all of a folder, and gives files the permissions that the umask says: writers of safetensors
    leave them readable by their owner only."""
    probe = (path if path.is_dir() else path.parent) / f".mode-{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for item in (*path.rglob("*"), path):
        if item.is_file():
            item.chmod(mode)
        sync(item)


def lock(path: Path, mode: str, *, shared: bool = False) -> IO[bytes] | None:
    """Opens a file and locks it, until it is closed or this process is no more; None if another holds it.

    The lock is flock's: of this machine on a local disk, of every machine on NFS (Linux 2.6.12 and later).

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    while True:
        file: IO[bytes] = path.open(mode)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass  # its holder has removed it since it was opened
        except BaseException:
            file.close()
            raise
        file.close()


class WriterLock:
    """Says that a folder has a writer. The file is there as long as the writer is, or was killed."""

    NAME = ".lock"

    def __init__(self, folder: Path) -> None:
        self.file = folder / self.NAME
        self._held: IO[bytes] | None = None

    def take(self, what: str, *, create: bool) -> None:
        """Takes the lock; without `create` only if a writer has been here.

        Raises:
            UserError: another process writes there, or nobody can know.
        """
        if self._held is not None or not (create or self.file.exists()):
            return
        try:
            self._held = lock(self.file, "a+b")
        except OSError as error:
            raise UserError(f"{what} cannot be locked against a second writer: {error.strerror or error}") from error
        if self._held is None:
            raise UserError(f"{what} is being written by {self._holder()}; wait for it to end, or choose another")
        self._held.truncate(0)
        self._held.write(json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
        self._held.flush()

    def close(self) -> None:
        """Lets others write."""
        if self._held is not None:
            self.file.unlink(missing_ok=True)
            self._held.close()
            self._held = None

    def _holder(self) -> str:
        try:
            said = json.loads(self.file.read_bytes())
            return f"process {int(said['process'])} on {str(said['host'])[:80]}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "another process"
