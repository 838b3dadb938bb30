"""The inputs of a run beside its run file and weights: recorded when it begins, compared when it is resumed."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc

from moetune.documents import read_json
from moetune.errors import UserError
from moetune.models.hub.fingerprint import digest
from moetune.models.hub.snapshot import small_files
from moetune.training.data.documents import values
from moetune.training.data.load import Datasets

CONFIG_FILE = "config.json"
_SAYS_NOTHING = {"_name_or_path", "transformers_version"}
"""Keys of a config.json that do not change the model."""
_MAKES_TOKENS = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "*.tiktoken")
"""Files that decide which tokens a text becomes."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run.

    Attributes:
        run: a random name.
        data: SHA-256 of the sequences of `train` and `eval`.
        config: the base's config.json.
        files: SHA-256, by name, of the other small files beside the base's weights: tokenizer, generation settings.
    """

    run: str
    data: dict[str, str]
    config: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def of(cls, data: Datasets, base: Path | None) -> Inputs:
        """Return the inputs of a run that begins now. `base` is the folder of the model, if there is one."""
        tokens = {
            name: _digest(rows) for name, rows in (("train", data.train), ("eval", data.eval)) if rows is not None
        }
        return cls(secrets.token_hex(16), tokens, *beside_weights(base))

    def refuse_others(self, now: Inputs, where: str) -> list[str]:
        """Compare with the inputs of the resumed run; return a line for each harmless change.

        Raises:
            UserError: another change.
        """
        files, harm = self._changed(now.files), []
        if self.data.get("train") != now.data["train"]:
            because = f" (or what makes tokens of it: {', '.join(files)})" if files else ""
            harm.append(f"data.train has changed since it began{because}: its tokens are others")
        notes = self.refuse_other_model(now.config, now.files, f"{where} cannot be resumed", harm)
        if self.data.get("eval") != now.data.get("eval"):
            notes.append(
                "data.eval has changed since the run began: held-out losses before and after are of other data"
            )
        return notes

    def refuse_other_model(
        self, config: dict[str, Any], files: dict[str, str], where: str, harm: Sequence[str] = ()
    ) -> list[str]:
        """Compare with another base's configuration and files; return a line for each harmless change.

        Args:
            config, files: as `beside_weights` returns them.
            harm: lines of other harmful changes.

        Raises:
            UserError: a change of the model or of the tokens, or `harm`.
        """
        changed, lines = self._changed(files), list(harm)
        for key in _differing(self.config, config) if self.config and config else ():
            if key not in _SAYS_NOTHING:
                said = (repr(one.get(key, "not there"))[:80] for one in (config, self.config))
                lines.append("{} of the base: {} is {}, and was {}".format(CONFIG_FILE, key, *said))
        beside = "beside the base's weights has changed since the run began"
        makes_tokens = [name for name in changed if any(Path(name).match(pattern) for pattern in _MAKES_TOKENS)]
        lines += [f"{name} {beside}, and makes other tokens" for name in makes_tokens]
        if lines:
            raise UserError("\n  ".join([f"{where}:", *lines]) + "\nPut back what it was, or choose another output")
        return [f"{name} {beside}" for name in changed]

    def _changed(self, files: dict[str, str]) -> list[str]:
        return _differing(self.files, files) if self.files and files else []


def beside_weights(base: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a base's config.json, and the digests of the other small files beside its weights by name."""
    files = {} if base is None else {str(file.relative_to(base)): file for file in small_files(base)}
    config = files.pop(CONFIG_FILE, None)
    said = {} if config is None else read_json(config, dict[str, Any])
    return said, {name: digest(file) for name, file in files.items()}


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    absent = object()
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key, absent) != now.get(key, absent)]


def _digest(rows: datasets.Dataset) -> str:
    """Return the digest of every column's values and lengths, however they are chunked."""
    sha256 = hashlib.sha256()
    for name in sorted(rows.column_names):
        sha256.update(name.encode())
        for some in values(rows, name):
            sha256.update(some.tobytes())
        for chunk in rows.data.column(name).chunks:
            sha256.update(pc.list_value_length(chunk).to_numpy(zero_copy_only=False).astype("int64").tobytes())
    return sha256.hexdigest()
