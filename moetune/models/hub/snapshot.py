"""Download of a model from the hub, its cache folder, a checkpoint's small files."""

import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache

from moetune.errors import UserError, counted, one_line
from moetune.models.hub.reach import UNREACHABLE, how_to_get, hub_is_reachable
from moetune.tensor_files import INDEX_FILE, SINGLE_FILE, weight_files

CARRIED = (
    "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Patterns of the files that belong to a checkpoint besides its weights: config, tokenizer, templates, license."""
QUANTIZED_MANIFEST = "packed.json"
"""Name of the manifest in a folder that `moetune quantize` wrote."""
_OF_OTHERS = ("adapter_*", "*.index.json", "manifest.json", QUANTIZED_MANIFEST)
"""Patterns of files that match `CARRIED` but are not copied: adapters' files, and lists of other files."""


def small_files(folder: Path) -> list[Path]:
    """Return the sorted paths of a checkpoint's files besides weights: config, tokenizer, templates, licenses."""
    carried = {file for pattern in CARRIED for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in carried if not any(file.match(name) for name in _OF_OTHERS))


def copy_small_file(file: Path, folder: Path, to: Path) -> None:
    """Copy a file of the checkpoint in `folder` to the same relative path below the folder `to`.

    Raises `UserError` for a link to a file outside of `folder`; links of hub snapshots into their own cache are
    followed.
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
    """Return the folder of a model in the local hub cache; None unless all of its weight files are there."""
    for name in (SINGLE_FILE, INDEX_FILE):
        cached = try_to_load_from_cache(hub_id, name)
        if isinstance(cached, str):
            folder = Path(cached).parent
            try:
                weight_files(folder)
            except UserError:  # some weight files are missing
                return None
            return folder
    return None


def download(hub_id: str) -> Path:
    """Download a model and return its folder in the local hub cache.

    If the weights are cached, only small files that are missing are downloaded, and failing to do so is no error.
    Before weights are downloaded, their size is printed on stderr.

    Raises:
        UserError: the weights are not in the cache and cannot be downloaded: no network, no such model, or no access.
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
    except Exception as error:  # no network, no access, or no such model
        if folder is not None:
            return folder
        raise UserError(
            f"the weights of {hub_id!r} cannot be downloaded from the hub: {one_line(error)} {how_to_get(hub_id)}"
        ) from None
