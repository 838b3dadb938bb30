"""What a run is given beside its run file and its weights: noted when it begins, compared when it goes on."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc

from moetune.data.documents import values
from moetune.data.load import Datasets
from moetune.documents import read_json
from moetune.errors import UserError
from moetune.hub.fingerprint import digest
from moetune.hub.snapshot import small_files

CONFIG_FILE = "config.json"
_SAYS_NOTHING = {"_name_or_path", "transformers_version"}
"""Keys of a config.json that no model is made of."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run.

    Attributes:
        run: drawn when the run began; no other run has it.
        data: `train`, `eval` -> SHA-256 of its tokens and labels as they lie in sequences.
        config: what the base's config.json says.
        files: the other small files beside the base's weights, tokenizer and generation settings: name -> SHA-256.
    """

    run: str
    data: dict[str, str]
    config: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def of(cls, data: Datasets, base: Path | None) -> Inputs:
        """Those of a run that begins now.

        Args:
            base: the folder of the model; None where nothing on disk describes it.
        """
        tokens = {
            name: _digest(rows) for name, rows in (("train", data.train), ("eval", data.eval)) if rows is not None
        }
        files = {} if base is None else {str(file.relative_to(base)): file for file in small_files(base)}
        config = files.pop(CONFIG_FILE, None)
        said = {} if config is None else read_json(config, dict[str, Any])
        return cls(secrets.token_hex(16), tokens, said, {name: digest(file) for name, file in files.items()})

    def refuse_others(self, now: Inputs, where: str) -> list[str]:
        """What has changed and does no harm to a run that goes on, a line each.

        Raises:
            UserError: what makes it another run.
        """
        files = [] if not self.files or not now.files else _differing(self.files, now.files)
        harm = list(_harm(self, now, files))
        if harm:
            lines = "\n  ".join(harm)
            raise UserError(f"{where} cannot be resumed:\n  {lines}\nPut back what it was, or choose another output")
        notes = [
            f"{name} beside the base's weights has changed since the run began; the tokens of the data are the same"
            for name in files
        ]
        if self.data.get("eval") != now.data.get("eval"):
            notes.append(
                "data.eval has changed since the run began: held-out losses before and after are of other data"
            )
        return notes


def _harm(before: Inputs, now: Inputs, files: list[str]) -> Iterator[str]:
    if before.data.get("train") != now.data["train"]:
        because = f" (or what makes tokens of it: {', '.join(files)})" if files else ""
        yield f"data.train has changed since it began{because}: its tokens are others"
    for key in _differing(before.config, now.config) if before.config and now.config else ():
        if key not in _SAYS_NOTHING:
            said = (repr(config.get(key, "not there"))[:80] for config in (now.config, before.config))
            yield "{} of the base: {} is {}, and was {}".format(CONFIG_FILE, key, *said)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    absent = object()
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key, absent) != now.get(key, absent)]


def _digest(rows: datasets.Dataset) -> str:
    """Of every column's values and lengths, whatever pieces they lie in."""
    sha256 = hashlib.sha256()
    for name in sorted(rows.column_names):
        sha256.update(name.encode())
        for some in values(rows, name):
            sha256.update(some.tobytes())
        for chunk in rows.data.column(name).chunks:
            sha256.update(pc.list_value_length(chunk).to_numpy(zero_copy_only=False).astype("int64").tobytes())
    return sha256.hexdigest()
