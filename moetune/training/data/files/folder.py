"""Which files of a folder are read: a split's, as `datasets` finds them.

A folder that `datasets` itself wrote (`save_to_disk`) is opened by `datasets`, and one with LLaMA-Factory's
`dataset_info.json` as that says (llama_factory.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from datasets.data_files import (
    DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME,
    DEFAULT_PATTERNS_SPLIT_IN_FILENAME,
    FILES_TO_IGNORE,
    SPLIT_PATTERN_SHARDED,
    sanitize_patterns,
)
from datasets.utils.metadata import MetadataConfigs
from fsspec.utils import glob_translate
from huggingface_hub import metadata_load

from moetune.errors import UserError, first_of, reading, shown
from moetune.training.data.files.opening import RECORD_ENDINGS, TEXT_ENDINGS, type_of
from moetune.training.data.files.source import Note, choose_split

_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5}).*")
_HARMLESS = {"data_files", "data_dir", "default", "description", "version", "features", "drop_labels", "drop_metadata"}
"""Keys of a configuration in a data set's card that do not change how records are read."""


@dataclass(frozen=True)
class _Card:
    """One of the configurations that the card of a data set (README.md) declares.

    Attributes:
        folder: the subfolder of its files, such as `en/`; "" for all.
        patterns: split -> patterns of its files; None if they are found by their names.
    """

    folder: str = ""
    patterns: Mapping[str, Sequence[str]] | None = None


def files_of_split(
    spec: str, folder: Path, config: str | None, split: str | None, held_out: bool, note: Note
) -> list[Path]:
    """Return the files of a split, in the order of their names.

    Splits are those of `datasets`: of the card's configuration, else by a name `data/SPLIT-00000-of-00001.*`, else by a
    keyword in a folder's name (`train`, `dev`, `eval`, …), else in a file's name. If none of these gives a split for
    training, it is all files that are in no other split (`datasets` hides them). All types of records are read
    (`datasets` reads the most frequent one), text files only if there are no records, and none whose name, or whose
    folder's name, begins with a dot.

    Args:
        spec: what the user wrote, for messages.
        config: name of a configuration in the card; None for the default.
        split, held_out: which split, as in `choose_split`.
        note: is told what is passed over, and which files of the split are missing.

    Raises:
        UserError: the folder has no file that can be read, or no such split or configuration; or its card cannot be
            read, or declares what is not there or how files are to be read.
    """
    files = [file for file in folder.rglob("*") if file.is_file() or file.is_symlink()]
    everything = sorted(file.relative_to(folder).as_posix() for file in files)
    visible = [name for name in everything if not _is_hidden(name) and Path(name).name not in FILES_TO_IGNORE]
    records = [name for name in visible if type_of(name) in RECORD_ENDINGS]
    names = records or [name for name in visible if type_of(name) in TEXT_ENDINGS]
    if not names:
        raise UserError(
            f"folder {spec!r} holds no file that can be read: {', '.join((*TEXT_ENDINGS, *RECORD_ENDINGS))}"
        )
    card = _card(spec, folder, config)
    splits = _splits(spec, [name for name in names if name.startswith(card.folder)], card)
    chosen = choose_split(spec, splits, split, held_out)
    read = splits[chosen]
    split_of = {name: owner for owner, members in splits.items() for name in members}
    rest = [
        f"{name} (split {split_of[name]})" if name in split_of else name
        for name in everything
        if name not in read and (not _is_hidden(name) or type_of(name) in (*TEXT_ENDINGS, *RECORD_ENDINGS))
    ]
    if rest:
        note(f"{spec!r}: the split {shown(chosen)} is read; passed over: {', '.join(first_of(rest))}")
    if missing := [*_missing(read)]:
        note(f"{spec!r}: the split {shown(chosen)} is not whole; missing: {', '.join(first_of(missing))}")
    return [folder / name for name in read]


def _is_hidden(name: str) -> bool:
    parts = Path(name).parts
    return any(part.startswith(".") for part in parts) or any(part.startswith("__") for part in parts[:-1])


def _splits(spec: str, names: list[str], card: _Card) -> dict[str, list[str]]:
    """Return split -> names of its files."""
    inside = [name.removeprefix(card.folder) for name in names]
    if card.patterns is not None:
        splits = {split: _matching(inside, globs) for split, globs in card.patterns.items()}
        if empty := [split for split, members in splits.items() if not members]:
            where = ", ".join(card.patterns[empty[0]])
            raise UserError(f"README.md of {spec!r} says that split {empty[0]!r} is {where}, and no such file is there")
    else:
        shards = {match[1] for name in inside if (match := re.fullmatch(r"data/([\w.]+)-\d{5}-of-\d{5}.*\..*", name))}
        orders: tuple[Mapping[str, Sequence[str]], ...] = (
            {split: [SPLIT_PATTERN_SHARDED.format(split=split)] for split in sorted(shards)},
            DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME,
            DEFAULT_PATTERNS_SPLIT_IN_FILENAME,
            {"train": ["**"]},
        )
        splits = {}
        for patterns in orders:
            if "train" in splits:
                break
            left = [name for name in inside if not any(name in members for members in splits.values())]
            for split, globs in patterns.items():
                if members := _matching(left, globs):
                    splits.setdefault(str(split), []).extend(members)
    return {split: [card.folder + name for name in members] for split, members in splits.items()}


def _matching(names: Iterable[str], globs: Iterable[str]) -> list[str]:
    """Return the names that match a pattern, in the order of the patterns, each once; `=` is a separator too."""
    patterns = [re.compile(glob_translate(glob.removeprefix("./"))) for glob in globs]
    matches = (
        name for pattern in patterns for name in names if any(map(pattern.match, (name, name.replace("=", "-"))))
    )
    return [*dict.fromkeys(matches)]


def _missing(names: Iterable[str]) -> Iterable[str]:
    """Yield the names of shards that are not there, although the names of others say that they belong to the set."""
    shards: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            shards.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (begin, count), numbers in shards.items():
        yield from (f"{begin}{number:05}-of-{count:05}" for number in range(count) if number not in numbers)


def _card(spec: str, folder: Path, config: str | None) -> _Card:
    """Return the configuration `config` of the data set's card, or the default one; `UserError` if there is none."""
    declared: dict[str, Any] = {}
    with reading(f"the card of {spec!r}, its README.md or .huggingface.yaml,", "correct or remove it"):
        if (readme := folder / "README.md").is_file():
            declared |= metadata_load(readme) or {}
        if (standalone := folder / ".huggingface.yaml").is_file():
            declared |= yaml.safe_load(standalone.read_text(encoding="utf-8")) or {}
        configs = MetadataConfigs.from_dataset_card_data(declared)
        name = config or configs.get_default_config_name()
    if not configs and config is None:
        return _Card()
    if name not in configs:
        known = ", ".join(configs) or "none"
        raise UserError(
            f"{spec!r} has {'several configurations' if name is None else f'no configuration {name!r}'} (README.md "
            f"declares {known}); write {spec}:CONFIGURATION:SPLIT"
        )
    settings: dict[str, Any] = configs[name]
    if unread := settings.keys() - _HARMLESS:
        key = min(unread)
        raise UserError(
            f"README.md of {spec!r} says to read its files with {key}: {shown(settings[key])}, which is not done here; "
            "convert them to JSON lines, or name a file"
        )
    files, inside = settings.get("data_files"), (settings.get("data_dir") or "").removeprefix("./").strip("/")
    return _Card(f"{inside}/" if inside else "", None if files is None else sanitize_patterns(files))
