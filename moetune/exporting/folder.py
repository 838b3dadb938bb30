"""The folder that an export writes: aside first, then renamed, so that one with its final name is whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.errors import UserError
from moetune.hub.delta_folder import MANIFEST, read_manifest
from moetune.training.run_folder import sync

_FORMATS = ("delta", "merged", "applied")


@dataclass(frozen=True)
class Exported:
    """What was written: how many tensors of the model changed, their bytes, and what a user should know."""

    format: str
    step: int | None
    tensors: int
    bytes: int
    notes: tuple[str, ...] = ()


@contextmanager
def new_folder(out: Path, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Yields an empty folder beside `out`, which takes its name at the end; if anything fails, nothing is left.

    What a process that is no more left aside goes first; what it had just moved away from `out` goes back there.

    Args:
        overwrite: replace what is in `out`, if an export wrote it.
        needed: bytes that will be written.

    Raises:
        UserError: `out` is occupied, cannot be written, or its disk is too small; or another file failed meanwhile.
    """
    out = out.expanduser().absolute()
    _clear_leftovers(out)
    refuse_unfit(out, overwrite, needed)
    aside, old = out.with_name(f".{out.name}-{os.getpid()}"), out.with_name(f".{out.name}-{os.getpid()}-old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        for file in (*aside.rglob("*"), aside):
            sync(file)
        _take_place(aside, out, old)
    except OSError as error:
        if error.errno is None:  # transformers raises OSError for what is no input or output
            raise
        if not _is_about(error, out, aside):
            raise UserError(f"{str(error.filename)!r} cannot be read or written: {error.strerror}") from error
        raise UserError(f"--out {str(out)!r} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps({"schema": 1, **manifest}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def refuse_unfit(out: Path, overwrite: bool, needed: int = 0) -> None:
    """Raises `UserError` if `out` is occupied, or its disk too small for what will be written."""
    out = out.expanduser().absolute()
    free = shutil.disk_usage(next(path for path in (out, *out.parents) if path.is_dir())).free
    if free < needed:
        raise UserError(f"--out {str(out)!r}: {needed:,} bytes are needed there and {free:,} are free")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out {str(out)!r} exists and is not a folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--out {str(out)!r} is not empty; replace what is there with --overwrite, or choose another")
    if not _is_export(out):
        raise UserError(f"--out {str(out)!r} holds something that no export wrote; choose another")


def _take_place(aside: Path, out: Path, old: Path) -> None:
    """Gives the folder aside its name. What has that name now is removed last, and has it again if that fails."""
    replaces = out.exists()
    if replaces:
        out.rename(old)
    try:
        aside.rename(out)
    except BaseException:
        if replaces:
            old.rename(out)
        raise
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    """Removes what a killed export left beside `out`: half of an export, or the one that it was about to replace."""
    siblings = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    for folder in siblings:
        named = re.fullmatch(rf"\.{re.escape(out.name)}-(\d+)(-old)?", folder.name)
        if named is None or _is_running(int(named[1])):
            continue
        if named[2] and not out.exists():
            folder.rename(out)  # killed between the two renames: it is the only whole one
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Whether it is another process that runs; this one has only begun."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _is_about(error: OSError, out: Path, aside: Path) -> bool:
    """Whether it is `out` that cannot be written. A full disk is, though `shutil` then names the file that it read."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or not isinstance(error.filename, str | os.PathLike):
        return True
    file = Path(error.filename).absolute()
    return file.is_relative_to(aside) or file in (out, *out.parents)


def _is_export(out: Path) -> bool:
    """Whether an export wrote the folder: a manifest of ours, or an adapter."""
    manifest = read_manifest(out)
    return (out / "adapter_config.json").is_file() if manifest is None else manifest.get("format") in _FORMATS


def keep_apart(out: Path, doing: str, *kept: Path) -> None:
    """Refuses to write over what is being `doing`, exported say, whatever `--overwrite` says."""
    target = out.expanduser().resolve()
    for folder in (path.resolve() for path in kept):
        if target == folder or target in folder.parents:
            raise UserError(f"--out {str(out)!r} holds what is being {doing}; choose another")
