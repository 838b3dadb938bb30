"""What every export has: its manifest, and a folder apart from what it reads."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from moetune.errors import UserError
from moetune.files import expanded
from moetune.models.hub.delta_folder import MANIFEST


class Written(NamedTuple):
    """What an export wrote: the number of tensors with trained values, their bytes, and notes for the user."""

    tensors: int
    bytes: int
    notes: tuple[str, ...] = ()


def write_export_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json` into an export's folder, with the schema number before the given entries."""
    text = json.dumps({"schema": 1, **manifest}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def keep_apart(out: Path, doing: str, *kept: Path) -> None:
    """Raise `UserError` if the output folder is one of the input folders `kept`, or contains one.

    `doing` is a participle for the message, such as "exported".
    """
    target = expanded(out).resolve()
    for folder in (path.resolve() for path in kept):
        if target == folder or target in folder.parents:
            raise UserError(f"--out {str(out)!r} holds what is being {doing}; choose another")
