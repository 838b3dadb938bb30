"""A model on the hub: the folder that it was downloaded to."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache

from moetune.errors import UserError, counted, one_line
from moetune.models.hub.reach import UNREACHABLE, how_to_get, hub_is_reachable
from moetune.models.hub.tensor_files import INDEX_FILE, SINGLE_FILE, weight_files

CARRIED = (
    "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""What belongs to a checkpoint beside its weights."""
QUANTIZED_MANIFEST = "packed.json"
"""In a folder that `moetune quantize` wrote."""
_OF_OTHERS = ("adapter_*", "*.index.json", "manifest.json", QUANTIZED_MANIFEST)
"""What matches and does not: an adapter's, and what speaks of files by their names."""


def small_files(folder: Path) -> list[Path]:
    """What belongs to a checkpoint beside its weights, in the order of names."""
    found = {file for pattern in CARRIED for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if not any(file.match(name) for name in _OF_OTHERS))


def copy_small_file(file: Path, folder: Path, to: Path) -> None:
    """Copy a file of a checkpoint's `folder` to the same place in another.

    Raises:
        UserError: it is a link to a file outside of the folder, which belongs to something else. Links of the hub's
            snapshots point into their own cache, and are followed.
    """
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parents[1] / "blobs")
    target = file.resolve()
    if not any(target.is_relative_to(home) for home in homes):
        raise UserError(
            f"{str(file)!r} is a link to {str(target)!r}, outside of the model's folder, and would be copied with it; "
            "put the file itself there, or remove the link"
        )
    copy = to / file.relative_to(folder)
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, copy)


def downloaded(hub_id: str) -> Path | None:
    """The snapshot that loading takes, if all of its weights are on this machine."""
    for name in (SINGLE_FILE, INDEX_FILE):
        found = try_to_load_from_cache(hub_id, name)
        if isinstance(found, str):
            folder = Path(found).parent
            try:
                weight_files(folder)
            except UserError:  # some shards are not there yet
                return None
            return folder
    return None


def download(hub_id: str) -> Path:
    """The snapshot with its weights, from this machine or else from the hub, and all that belongs to them.

    What is downloaded, and how large it is, is said on stderr first.

    Raises:
        UserError: it is not here and cannot be had: no network, no such model, or no right to it.
    """
    folder = downloaded(hub_id)
    wanted: dict[str, Any] = {"allow_patterns": list(CARRIED), "revision": folder and folder.name}
    if folder is None:
        wanted = {"allow_patterns": ["*.safetensors", *CARRIED], "ignore_patterns": ["consolidated*"]}
    try:
        if not hub_is_reachable():
            raise OSError(UNREACHABLE)
        if folder is None:
            missing = [file for file in snapshot_download(hub_id, dry_run=True, **wanted) if file.will_download]
            size = sum(file.file_size for file in missing) / 1e9
            print(f"downloading {hub_id}: {size:.2f} GB in {counted(len(missing), 'file')}", file=sys.stderr)
        return Path(snapshot_download(hub_id, **wanted))
    except Exception as error:  # no network, gated, removed: all end here
        if folder is not None:
            return folder
        raise UserError(
            f"the weights of {hub_id!r} cannot be had from the hub: {one_line(error)} {how_to_get(hub_id)}"
        ) from None
