"""The folder that an export writes: aside first, then renamed, so that one with its final name is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.errors import UserError
from moetune.hub.delta_folder import MANIFEST, read_manifest
from moetune.train.run_folder import sync

_FORMATS = ("delta", "merged", "applied")


@dataclass(frozen=True)
class Exported:
    """What was written: how many tensors of the model changed, their bytes, and what a user should know."""

    format: str
    step: int
    tensors: int
    bytes: int
    notes: tuple[str, ...] = ()


@contextmanager
def new_folder(out: Path, overwrite: bool, needed: int = 0) -> Iterator[Path]:
    """Yields an empty folder beside `out`, which takes its name at the end; if anything fails, nothing is left.

    Args:
        overwrite: replace what is in `out`, if an export wrote it.
        needed: bytes that will be written.

    Raises:
        UserError: `out` is occupied, cannot be written, or its disk is too small.
    """
    refuse_unfit(out, overwrite, needed)
    out = out.expanduser().absolute()
    aside, old = out.with_name(f".{out.name}-{os.getpid()}"), out.with_name(f".{out.name}-{os.getpid()}-old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        for file in aside.rglob("*"):
            sync(file)
        if out.exists():
            out.rename(old)
        aside.rename(out)
        sync(out.parent)
    except OSError as error:
        if error.errno is None:  # transformers raises OSError for what is no input or output
            raise
        raise UserError(f"--out {str(out)!r} cannot be written: {error.strerror or error}") from error
    finally:
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)


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


def _is_export(out: Path) -> bool:
    """Whether an export wrote the folder: a manifest of ours, or an adapter."""
    manifest = read_manifest(out)
    return (out / "adapter_config.json").is_file() if manifest is None else manifest.get("format") in _FORMATS
