"""Refuse to resume or export a run whose settings, data, tokenizer or base changed."""

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc

from moetune.config.load import parse, read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError, first_of, reading
from moetune.json_files import read_json
from moetune.models.hub.fingerprint import digest
from moetune.models.hub.snapshot import small_files
from moetune.parallel.coordinates import data_ranks
from moetune.training.data.chats.stop_tokens import turn_ends
from moetune.training.data.documents import values
from moetune.training.data.load import Datasets

FREE_ON_RESUME = {
    "output", "hardware", "parallel", "data.train", "data.eval", "train.steps", "train.epochs", "train.log_every",
    "train.eval_every", "train.save_every", "train.keep_checkpoints", "train.report_to", "train.eval_micro_batch",
    "train.on_oom", "train.checkpointing", "train.keep_rows", "train.expert_memory", "train.loss_memory",
    "train.early_stopping", "train.layer_by_layer",
}  # fmt: skip
"""Settings that a resumed run may change; a section's name stands for all of its keys. Of data their tokens are
compared, and so may lie elsewhere."""
BASE = {"model.path"}
"""Settings that it may change if its weights are compared (`base.json`), which may have moved since."""
FREE_ON_EXPORT = FREE_ON_RESUME | BASE | {"model.weights"}
"""Settings that may differ between a run and its checkpoint on export."""
CONFIG_FILE = "config.json"
_SAYS_NOTHING = {"_name_or_path", "transformers_version"}
"""Keys of a config.json whose values do not change the model."""
_MAKES_TOKENS = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "*.tiktoken")
"""Files of a tokenizer that determine the tokens of a text; patterns of names."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run besides its run file and its weights; stored in `inputs.json`.

    Attributes:
        run: a random name, the same in the run folder and in all checkpoints of a run.
        data: `train` and, if there is evaluation data, `eval` -> hexadecimal SHA-256 of the tokenized sequences.
        config: contents of the base's config.json; empty if unknown.
        files: relative path -> hexadecimal SHA-256 of the other small files beside the base's weights: those of the
            tokenizer, chat templates, generation settings, licenses; empty if unknown.
        ends: token -> number of turns of the training data that end with it, "" for none; empty without chats.
        clock: the time that the chat template writes, of the run's beginning (ISO 8601, local time); None if it writes
            none.
    """

    run: str
    data: dict[str, str]
    config: dict[str, Any]
    files: dict[str, str]
    ends: dict[str, int] = field(default_factory=dict)
    clock: str | None = None

    @classmethod
    def of(cls, data: Datasets, base: Path | None) -> "Inputs":
        """Return the inputs of a run that begins now; `base` is the folder of its weights, None if they are not on this
        machine."""
        tokens = {
            name: _digest(rows) for name, rows in (("train", data.train), ("eval", data.eval)) if rows is not None
        }
        ends = turn_ends(data.counts.ends, data.stops)
        clock = None if data.clock is None else data.clock.isoformat()
        return cls(secrets.token_hex(16), tokens, *beside_weights(base), ends, clock)

    def refuse_others(self, now: "Inputs", where: str) -> list[str]:
        """Compare the inputs with which a run began with those that it would be resumed with, `now`.

        Args:
            where: how messages name the run, such as `the run in 'out'`.

        Returns:
            A line for each harmless change: other evaluation data, or files that change neither model nor tokens.

        Raises:
            UserError: the training data, the config.json or a tokenizer file has changed.
        """
        files, harm = self._changed(now.files), []
        if self.data.get("train") != now.data["train"]:
            because = f" (or what makes tokens of it: {', '.join(files)})" if files else ""
            harm.append(f"data.train has changed since it began{because}: its tokens differ")
        notes = self.refuse_other_model(now.config, now.files, f"{where} cannot be resumed", harm)
        if self.data.get("eval") != now.data.get("eval"):
            notes.append(
                "data.eval has changed since the run began: held-out losses before and after are of other data"
            )
        return notes

    def refuse_other_model(
        self, config: dict[str, Any], files: dict[str, str], where: str, harm: Sequence[str] = ()
    ) -> list[str]:
        """Compare the base's config.json, its tokenizer's and other small files with those that the run began with.

        An empty `config` or `files`, given or recorded, means unknown and is not compared.

        Args:
            config, files: of the base as it is now; the two results of `beside_weights`.
            where: the beginning of the message, such as `the run in 'out' cannot be resumed`.
            harm: lines about harmful changes found elsewhere, to be raised with those found here.

        Returns:
            A line for each changed file that changes neither model nor tokens.

        Raises:
            UserError: `config` or a tokenizer file has changed, or `harm` is not empty.
        """
        changed, lines = self._changed(files), list(harm)
        for key in _differing(self.config, config) if self.config and config else ():
            if key not in _SAYS_NOTHING:
                now, before = (repr(settings.get(key, "not there"))[:80] for settings in (config, self.config))
                lines.append(f"{CONFIG_FILE} of the base: {key} is {now}, and was {before}")
        beside = "beside the base's weights has changed since the run began"
        makes_tokens = [name for name in changed if any(Path(name).match(pattern) for pattern in _MAKES_TOKENS)]
        lines += [f"{name} {beside}, and gives other tokens" for name in makes_tokens]
        if lines:
            raise UserError("\n  ".join([f"{where}:", *lines]) + "\nRestore the original, or choose another output")
        return [f"{name} {beside}" for name in changed]

    def _changed(self, files: dict[str, str]) -> list[str]:
        """Return the names of files that differ; none if the files of either side are not known."""
        return _differing(self.files, files) if self.files and files else []


def beside_weights(base: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the contents of config.json in the checkpoint folder `base`, and the digests of its other small files.

    Small files are all that belong to a checkpoint besides weights (`snapshot.small_files`): those of the tokenizer,
    chat templates, generation settings, licenses. Their digests are relative path -> hexadecimal SHA-256. Both results
    are empty if `base` is None, and the first if there is no config.json.

    Raises:
        UserError: config.json cannot be read.
    """
    files = {} if base is None else {str(file.relative_to(base)): file for file in small_files(base)}
    config = files.pop(CONFIG_FILE, None)
    content = {} if config is None else read_json(config, dict[str, Any])
    return content, {name: digest(file) for name, file in files.items()}


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the sorted keys whose values differ, or that only one dict has."""
    absent = object()
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key, absent) != now.get(key, absent)]


def _digest(rows: datasets.Dataset) -> str:
    """Return the hexadecimal SHA-256 of all columns' names, values and row lengths, independent of Arrow's chunks."""
    sha256 = hashlib.sha256()
    for name in sorted(rows.column_names):
        sha256.update(name.encode())
        for block in values(rows, name):
            sha256.update(block.tobytes())
        for chunk in rows.data.column(name).chunks:
            sha256.update(pc.list_value_length(chunk).to_numpy(zero_copy_only=False).astype("int64").tobytes())
    return sha256.hexdigest()


def changed_settings(before: RunConfig | Path, now: RunConfig | Path, free: set[str]) -> list[str]:
    """Return a line for each setting that differs between two configurations; at most 10, and then "N more".

    Args:
        before, now: configurations, or paths of run files to read.
        free: settings that may differ; a section's name stands for all of its keys.

    Raises:
        UserError: a run file cannot be read.
    """
    with suppress(OSError):  # reading them reports it
        if isinstance(before, Path) and isinstance(now, Path) and before.read_bytes() == now.read_bytes():
            return []
    old, new = (_settings(run if isinstance(run, RunConfig) else _recorded(run)) for run in (before, now))
    return first_of(
        [
            f"{key}: {old.get(key)!r} before, {new.get(key)!r} now"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and not any(key == name or key.startswith(f"{name}.") for name in free)
        ]
    )


def _recorded(run_file: Path) -> RunConfig:
    what = repr(str(run_file))
    with reading(what):
        return read_run_config(parse(run_file.read_text(encoding="utf-8"), what), (), what)


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as a flat dict `{"train.steps": 9, …}`.

    `train.accumulate` is multiplied by the number of ranks that see different data: more ranks with fewer
    micro-batches each take the same step.
    """
    tree = config.model_dump(mode="json")
    tree["train"]["accumulate, over all ranks"] = tree["train"].pop("accumulate") * data_ranks(config.parallel)
    return _flat(tree)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict, with keys joined by dots."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
