"""Path checks, atomic writes, locks; the ledger of what moetune wrote into a folder."""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from moetune.errors import UserError, shown

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # bytes on Linux and macOS; 4,000 leaves room for files in the folder


def check_path(text: str) -> Path:
    """Return the path that a user wrote, with `~` expanded.

    Raises:
        ValueError: no file can have this name: no character at all, a NUL character, bytes that are not UTF-8, an
            unknown `~user`, a name of more than 255 bytes, or a path of more than 4,000.
    """
    if not text:
        raise ValueError("it is empty")
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
    """Return a path with `~` expanded; raise `UserError` for what is no path, and for a name that no file can have
    (`check_path`)."""
    if not isinstance(path, str | Path):
        raise UserError(
            f"a {type(path).__name__} is no path; give a model by its folder, or as moetune.build returned it, and the "
            "values of a run file as moetune.RunConfig.model_validate(values)"
        )
    try:
        return check_path(str(path))
    except ValueError as error:
        raise UserError(f"{shown(str(path))} cannot be a path: {error}") from None


@cache
def source_digest(*patterns: str) -> str:
    """Return the SHA-256, in hexadecimal, of moetune's source files that match any pattern, such as `adapt/*.py`."""
    digest, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def names_in(folder: Path) -> list[str]:
    """Return the names of the entries of a folder; an empty list if the folder cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def nearest_existing(path: Path) -> Path:
    """Return `path`, if there is something, else the nearest of its parents that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path that need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_existing(path: Path) -> None:
    """Raise `FileExistsError` if there is anything at a path, even a broken link."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write a file atomically: to a temporary file beside it, which is synced and then renamed to `path`; text as
    UTF-8. With `new`, raise `FileExistsError` instead of replacing an existing file.

    Raises:
        OSError: writing or renaming fails; the temporary file is removed.
    """
    aside = path.with_name(f".moetune-{secrets.token_hex(8)}")
    try:
        with aside.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if new:
            refuse_existing(path)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


ASIDE = re.compile(r"\.moetune-[0-9a-f]{16}")
"""Names of the temporary files of `write_whole`, which a killed process may leave."""


_SIGNS = (b"<!-- written by moetune -->", b"Software\0moetune")
"""Byte strings that moetune writes into its HTML pages and its pictures, by which `refuse_taken` recognizes them."""


def refuse_taken(path: Path) -> None:
    """Raise `UserError` if there is something at the path other than a page or picture that moetune wrote.

    These are recognized by a mark in their first 64 KiB. A link is refused.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{str(path)!r} exists and is no ordinary file; choose another")
    with path.open("rb") as file:
        head = file.read(2**16)
    if not any(sign in head for sign in _SIGNS):
        raise UserError(f"{str(path)!r} exists and is not moetune's to replace; choose another")


def write_output(path: Path, content: str | bytes, *, replace: bool = False) -> None:
    """Write an output file of a command atomically; with `replace`, over any existing file.

    Raises:
        UserError: the file cannot be written; or, without `replace`, exists and is no page or picture of moetune.
    """
    if not replace:
        refuse_taken(path)
    refuse_in_checkpoint(path)
    try:
        write_whole(path, content, new=not replace and not path.exists())
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


class Ledger:
    """The list of the files that moetune wrote into a folder: a text file `.moetune` with one JSON string per line.

    A path is added before the file is created, and lines are only appended, so a run that is killed leaves no unlisted
    file. Commands replace or remove listed paths only. The constructor reads the ledger of a folder; one that is
    missing, unreadable or a link counts as empty.

    Attributes:
        paths: the listed paths, relative to the folder.
        kind: what the folder holds, such as `run`; None if the folder has no ledger.
    """

    NAME = ".moetune"

    def __init__(self, folder: Path) -> None:
        self.file, self.paths = folder / self.NAME, set[str]()
        self.kind: str | None = None
        with suppress(OSError, ValueError):
            if self.file.is_file() and not self.file.is_symlink():
                self._read(self.file.read_text(encoding="utf-8"))

    def _read(self, text: str) -> None:
        entries = []
        for line in text.split("\n")[:-1]:
            with suppress(ValueError, RecursionError):  # the line is cut short or damaged
                entries.append(json.loads(line))
        if entries and isinstance(entries[0], dict) and isinstance(kind := entries[0].get("written by moetune"), str):
            self.kind, self.paths = kind, {path for path in entries[1:] if isinstance(path, str)}

    def add(self, kind: str, *paths: str) -> None:
        """Append paths, relative to the folder, that are about to be written, and sync the ledger to disk.

        `kind` says what the folder holds.

        Raises:
            OSError: the ledger cannot be written, or is a link.
        """
        header = json.dumps({"written by moetune": kind})
        lines = [json.dumps(path) for path in sorted(set(paths) - self.paths)]
        if self.kind is None:
            lines.insert(0, header)
            with suppress(OSError):
                if not self.file.is_symlink() and header.startswith(self.file.read_text(encoding="utf-8")):
                    self.file.unlink()  # the header was cut short by a kill
        if lines:
            flags = os.O_CREAT | os.O_EXCL if self.kind is None else 0
            with os.fdopen(os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | flags, 0o666), "ab") as file:
                file.write(("\n" * (self.kind is not None) + "\n".join(lines) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        self.kind = kind
        self.paths |= set(paths)


def refuse_in_checkpoint(out: Path) -> None:
    """Raise `UserError` if an output would be in a checkpoint of a run, which would then count as damaged."""
    for folder in (*out.absolute().parents, *Path(os.path.realpath(out)).parents):
        if folder.name == "checkpoints" and Ledger(folder.parent).kind == "run":
            raise UserError(f"{str(out)!r} is among the checkpoints of a run; choose another")


_OF_SYSTEMS = re.compile(rf"\.DS_Store|\._.*|\.nfs.*|{ASIDE.pattern}")
"""Names of files that operating systems create by themselves, and of temporary files, which `foreign_in` ignores."""


def foreign_in(folder: Path, known: Collection[str]) -> Path | None:
    """Return the first file below a folder whose path, relative to it, is not in `known`; None if there is none.

    Folders, and files that operating systems create, need not be listed. `folder` itself is returned if it is a link or
    no folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder
    for item in sorted(folder.rglob("*")):
        is_folder = item.is_dir() and not item.is_symlink()
        if not is_folder and str(item.relative_to(folder)) not in known and not _OF_SYSTEMS.fullmatch(item.name):
            return item
    return None


def refused(error: BaseException) -> str | None:
    """Return the operating system's reason, as text, if an `OSError` caused an error; else None.

    Other libraries wrap it, so it is looked for in the error, its cause and context, the `failures` of torch's
    distributed checkpoints, and the text of Rust errors ("os error 28").
    """
    causes = [error, *(cause for cause in (error.__cause__, error.__context__) if cause is not None)]
    causes += [failure[0] for failure in getattr(error, "failures", {}).values()]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno is not None:
            where = f" ({cause.filename})" if cause.filename else ""
            return f"{cause.strerror or os.strerror(cause.errno)}{where}"
        if match := re.search(r"\(os error (\d+)\)", str(cause)):  # the form of Rust's messages
            return os.strerror(int(match[1]))
    return None


def settle(path: Path) -> None:
    """Sync a file, or a folder with all it contains, to disk, and give the files the default permissions (umask).

    safetensors creates its files readable by their owner only.
    """
    probe = (path if path.is_dir() else path.parent) / f".moetune-{secrets.token_hex(8)}"
    probe.touch(exist_ok=False)
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for item in (*path.rglob("*"), path):
        if item.is_file():
            item.chmod(mode)
        sync(item)


def lock(path: Path, mode: str) -> IO[bytes] | None:
    """Open a file and lock it with flock until it is closed; return None if another process holds the lock.

    flock excludes processes of this machine on a local disk, and of all machines on NFS (Linux 2.6.12 and later).

    Args:
        mode: `"r+b"` reads and writes; `"a+b"` also creates the file if it does not exist.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link; or its file system has no locks.
    """
    while True:
        flags = os.O_RDWR | (os.O_CREAT if mode == "a+b" else 0)
        # O_NOFOLLOW: refuse a link; O_NONBLOCK: do not wait for the other end of a named pipe
        file: IO[bytes] = os.fdopen(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), mode.replace("a", "r"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass  # the holder removed the file after it was opened here: try again
        except BaseException:
            file.close()
            raise
        file.close()


def refuse_pointer(file: Path) -> None:
    """Raise `UserError` if a file is a pointer of Git LFS, which a clone without Git LFS has in its place."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{str(file)!r} is a pointer of Git LFS; fetch the file with `git lfs pull` in its folder")
