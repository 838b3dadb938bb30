"""`new_folder`: write an export under a temporary name and rename it to `out` when it is complete."""

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
from moetune.files import Ledger, expanded, foreign_in, free_bytes, is_occupied, lock, refused, settle, sync
from moetune.models.hub.delta_folder import MANIFEST

_KIND = "export"
_OURS, _MARKER, _NEW, _OLD = ".moetune-export-", ".moetune", "new", "old"
"""Names of the temporary folder beside `out` (a prefix), and in it: the marker file, the folder that is being written,
and the older export while it is being replaced."""


class Written(NamedTuple):
    """What an export wrote: the number of tensors with trained values, their bytes, and notes for the user."""

    tensors: int
    bytes: int
    notes: tuple[str, ...] = ()


@contextmanager
def new_folder(out: Path, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Yield an empty temporary folder to write into; rename it to `out` when the body ends without an error.

    If the body raises, the temporary folder is removed and `out` is as it was. Leftovers of killed exports to the same
    `out`, recognized by a marker file that is locked while its process lives, are removed first; an older export that
    they had moved aside is moved back.

    Args:
        overwrite: replace `out` if it holds an earlier export.
        needed: bytes that will be written, to check the free space of the disk.

    Raises:
        UserError: `out` is occupied or cannot be written, or its disk is too small; or a file that the body reads
            cannot be read.
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
            _refuse_occupied(out, overwrite)  # another export may have written `out` meanwhile
            if out.exists():
                out.rename(ours / _OLD)
            (ours / _NEW).rename(out)
            sync(out.parent)
    except (OSError, SafetensorError) as error:
        if (reason := refused(error)) is None:  # transformers also raises OSError for other errors
            raise
        if isinstance(error, OSError) and not _is_about(error, out, ours):
            raise UserError(f"{str(error.filename)!r} cannot be read or written: {error.strerror}") from error
        raise UserError(f"--out {str(out)!r} cannot be written: {reason}") from error
    finally:
        _clear(ours, out)


def write_export_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json` into an export's folder, with the schema number before the given entries."""
    text = json.dumps({"schema": 1, **manifest}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def refuse_unfit(out: Path, overwrite: bool, needed: int = 0) -> None:
    """Raise `UserError` if the folder `out` is not new or empty, or its disk has fewer than `needed` bytes free.

    With `overwrite`, `out` may hold an earlier export, and nothing else.
    """
    out = expanded(out).absolute()
    _refuse_occupied(out, overwrite)
    if (free := free_bytes(out)) < needed:
        raise UserError(f"--out {str(out)!r}: {needed:,} bytes are needed there and {free:,} are free")


def keep_apart(out: Path, doing: str, *kept: Path) -> None:
    """Raise `UserError` if the output folder is one of the input folders `kept`, or contains one.

    `doing` is a participle for the message, such as "exported".
    """
    target = expanded(out).resolve()
    for folder in (path.resolve() for path in kept):
        if target == folder or target in folder.parents:
            raise UserError(f"--out {str(out)!r} holds what is being {doing}; choose another")


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    """Raise `UserError` if `out` has entries; with `overwrite`, if it has others than the files of an earlier
    export."""
    if not is_occupied(out, overwrite):
        return
    ledger = Ledger(out)
    if ledger.kind != _KIND:
        raise UserError(
            f"--out {str(out)!r} holds something that no export wrote, or one of an earlier version, which has no "
            f"{Ledger.NAME}; choose another"
        )
    if found := foreign_in(out, {Ledger.NAME, *ledger.paths}):
        raise UserError(f"--out {str(out)!r}: {str(found)!r} is not part of the export there; move it away")


def _clear_leftovers(out: Path) -> None:
    """Remove temporary folders of killed exports to `out`: those marked for `out` that no process has locked."""
    for ours in sorted(out.parent.glob(f"{_OURS}*")) if out.parent.is_dir() else ():
        with suppress(OSError):  # a folder of another user may be unreadable
            is_marked = (ours / _MARKER).is_file() and (ours / _MARKER).read_bytes() == _mark(out)
            if is_marked and not ours.is_symlink() and (marker := lock(ours / _MARKER, "r+b")) is not None:
                with marker:  # the lock was free, so its writer has ended
                    _clear(ours, out)


def _clear(ours: Path, out: Path) -> None:
    """Remove the temporary folder `ours`, marker last; if `out` is missing, first restore the older export in it."""
    if (ours / _OLD).exists() and not out.exists():
        (ours / _OLD).rename(out)
    for name in (_NEW, _OLD):
        shutil.rmtree(ours / name, ignore_errors=True)
    with suppress(OSError):
        (ours / _MARKER).unlink(missing_ok=True)
        ours.rmdir()


def _mark(out: Path) -> bytes:
    """Return the content of the marker file of an export to `out`, by which its leftovers are recognized."""
    return json.dumps({"schema": 1, "written by": "moetune", "of": out.name}).encode()


def _is_about(error: OSError, out: Path, ours: Path) -> bool:
    """Return whether an error concerns the output folder `out`, or `ours`, the temporary folder in which it is written,
    rather than a file that is read.

    A full disk always concerns the output, although `shutil` then names the file that it was reading.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or not isinstance(error.filename, str | os.PathLike):
        return True
    file = Path(error.filename).absolute()
    return file.is_relative_to(ours) or file in (out, *out.parents)
