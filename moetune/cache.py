"""A cache on disk of what can be computed again: gzipped JSON by key.

A file that is missing, damaged or cannot be read counts as missing; one that cannot be written is left out. Reading
executes nothing from a file.
"""

import gzip
import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moetune.errors import UserError
from moetune.files import check_path, source_digest, write_whole
from moetune.json_files import adapter_of

_MADE_BY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
"""Libraries whose versions what is kept depends on."""


def cache_folder(kind: str) -> Path:
    """Return the folder for files that can be computed again; `kind`, such as "reports", says what they are.

    It is `$MOETUNE_CACHE` for all kinds, or else `moetune/<kind>` under `$XDG_CACHE_HOME` or `~/.cache`, and need not
    exist.

    Raises:
        UserError: `MOETUNE_CACHE` is set to something that cannot be a path, or there is no home folder.
    """
    own = os.environ.get("MOETUNE_CACHE")
    try:
        if own:
            return check_path(own)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetune" / kind
    except (ValueError, RuntimeError) as error:
        raise UserError(f"MOETUNE_CACHE: {own!r} cannot be a path: {error}; set it to a folder") from None


def file_of(about: dict[str, Any]) -> Path:
    """Return the file of a prediction, in the folder "reports".

    Its name is a digest of `about`, the JSON values that the content depends on, of torch's switches, the versions of
    libraries and moetune's source, so that outdated files are never found.
    """
    whole = {"about": about, "versions": _versions(), "switches": _switches(), "source": source_digest("**/*.py")}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder("reports") / f"{digest[:32]}.json.gz"


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in _MADE_BY}


def _switches() -> list[bool]:
    """Return which kernels of attention torch may choose, and whether operations must be deterministic."""
    cuda = torch.backends.cuda
    kernels = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled
    return [is_on() for is_on in (*kernels, torch.are_deterministic_algorithms_enabled)]


def read_cached(file: Path, kind: Any) -> Any:
    """Read what `write_cached` wrote to a file, as a value of the type `kind`; None if there is no such value."""
    try:
        return adapter_of(kind).validate_json(gzip.decompress(file.read_bytes()))
    except Exception:  # whatever is wrong with the file: a new one is made
        return None


def write_cached(file: Path, kind: Any, content: Any) -> None:
    """Write `content`, a value of the type `kind` other than None, to a file, replacing an older one.

    Settings that a configuration leaves out stay left out. An error of the file system is ignored.
    """
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, gzip.compress(adapter_of(kind).dump_json(content, exclude_unset=True), 1))
