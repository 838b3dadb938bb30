"""The folder that an export writes: under a temporary name first, so that one with its final name is whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from moetune.errors import UserError
from moetune.files import Ledger, expanded, foreign_in, is_occupied, lock, refused, settle, sync
from moetune.models.hub.delta_folder import MANIFEST

_KIND = "export"
_OURS, _MARKER, _NEW, _OLD = ".moetune-export-", ".moetune", "new", "old"
"""The temporary folder beside `out`; in it a marker, the new folder, and the old one while it is replaced."""


class Written(NamedTuple):
    """How many tensors of what trained were written, their bytes, and notes for the user."""

    tensors: int
    bytes: int
    notes: tuple[str, ...] = ()


@contextmanager
def new_folder(out: Path, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Yield an empty folder that replaces `out` at the end; if anything fails, nothing is left.

    Its temporary folder has a marker, which names `out` and is locked while this process lives. What a killed export
    to `out` left is removed first; if it had moved an older export away, that is moved back.

    Args:
        overwrite: replace `out`, if an export wrote it.
        needed: bytes that will be written.

    Raises:
        UserError: `out` is occupied, cannot be written, or its disk is too small; or another file cannot be read.
    """
    out = expanded(out).absolute()
    _refuse_occupied(out, overwrite)
    ours = out.with_name(f"{_OURS}{secrets.token_hex(8)}")
    try:
        _clear_leftovers(out)
        refuse_unfit(out, overwrite, needed)
        out.parent.mkdir(parents=True, exist_ok=True)
        ours.mkdir()
        with (ours / _MARKER).open("xb") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX)
            marker.write(_mark(out))
            marker.flush()
            (ours / _NEW).mkdir()
            yield ours / _NEW
            files = (file for file in (ours / _NEW).rglob("*") if not file.is_dir())
            Ledger(ours / _NEW).add(_KIND, *(str(file.relative_to(ours / _NEW)) for file in files))
            settle(ours / _NEW)
            _refuse_occupied(out, overwrite)  # another export may have been faster
            if out.exists():
                out.rename(ours / _OLD)
            (ours / _NEW).rename(out)
            sync(out.parent)
    except (OSError, SafetensorError) as error:
        if (reason := refused(error)) is None:  # transformers raises OSError for more than input and output
            raise
        if isinstance(error, OSError) and not _is_about(error, out, ours):
            raise UserError(f"{str(error.filename)!r} cannot be read or written: {error.strerror}") from error
        raise UserError(f"--out {str(out)!r} cannot be written: {reason}") from error
    finally:
        _clear(ours, out)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps({"schema": 1, **manifest}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def refuse_unfit(out: Path, overwrite: bool, needed: int = 0) -> None:
    """Raise `UserError` if `out` is occupied, or its disk too small for `needed` bytes."""
    out = expanded(out).absolute()
    _refuse_occupied(out, overwrite)
    free = shutil.disk_usage(next(path for path in (out, *out.parents) if path.is_dir())).free
    if free < needed:
        raise UserError(f"--out {str(out)!r}: {needed:,} bytes are needed there and {free:,} are free")


def keep_apart(out: Path, doing: str, *kept: Path) -> None:
    """Refuse to overwrite the inputs of an export, whatever `--overwrite` says; `doing` names it, as in "exported"."""
    target = expanded(out).resolve()
    for folder in (path.resolve() for path in kept):
        if target == folder or target in folder.parents:
            raise UserError(f"--out {str(out)!r} holds what is being {doing}; choose another")


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    if not is_occupied(out, overwrite):
        return
    ledger = Ledger(out)
    if ledger.kind != _KIND:
        raise UserError(
            f"--out {str(out)!r} holds something that no export wrote, or one of an earlier version, which has no "
            f"{Ledger.NAME}; choose another"
        )
    if found := foreign_in(out, {Ledger.NAME, *ledger.paths}):
        raise UserError(f"--out {str(out)!r}: {str(found)!r} is not of the export there; move it away")


def _clear_leftovers(out: Path) -> None:
    """Clear the temporary folders of killed exports to `out`."""
    for ours in sorted(out.parent.glob(f"{_OURS}*")) if out.parent.is_dir() else ():
        with suppress(OSError):  # another's folder
            is_marked = (ours / _MARKER).is_file() and (ours / _MARKER).read_bytes() == _mark(out)
            if is_marked and not ours.is_symlink() and (marker := lock(ours / _MARKER, "r+b")) is not None:
                with marker:  # its writer is dead
                    _clear(ours, out)


def _clear(ours: Path, out: Path) -> None:
    """Move an older export back unless `out` exists, and remove the temporary folder, its marker last."""
    if (ours / _OLD).exists() and not out.exists():
        (ours / _OLD).rename(out)
    for name in (_NEW, _OLD):
        shutil.rmtree(ours / name, ignore_errors=True)
    with suppress(OSError):
        (ours / _MARKER).unlink(missing_ok=True)
        ours.rmdir()


def _mark(out: Path) -> bytes:
    return json.dumps({"schema": 1, "written by": "moetune", "of": out.name}).encode()


def _is_about(error: OSError, out: Path, ours: Path) -> bool:
    """Whether an error is of the output. A full disk is, although `shutil` then names the file that it read."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or not isinstance(error.filename, str | os.PathLike):
        return True
    file = Path(error.filename).absolute()
    return file.is_relative_to(ours) or file in (out, *out.parents)
