"""LLaMA-Factory's folders: `dataset_info.json` names the data sets, their files, and the keys of their records."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moetune.errors import UserError, first_of, shown, suggest
from moetune.json_files import read_json
from moetune.training.data.files.source import Note, Row

_PLACES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of which every entry has one: where its data are."""
_APPLIED = {*_PLACES, "formatting", "columns", "tags", "ranking"}
_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "history": "history",
    "messages": "conversations", "system": "system", "tools": "tools",
}  # fmt: skip
"""LLaMA-Factory's name of a column -> the key of Alpaca's or ShareGPT's records."""
_SPEAKERS = {
    "user": "human", "assistant": "gpt", "observation": "observation", "function": "function_call", "system": "system",
}  # fmt: skip
"""Role in a name such as `user_tag` -> the speaker in ShareGPT's records."""


@dataclass(frozen=True)
class Entry:
    """A data set of the folder.

    Attributes:
        name: the key in `dataset_info.json`.
        file: its file or folder, relative to the folder; None if it is elsewhere or not there.
        columns: LLaMA-Factory's name of a column -> the name in the records.
        tags: names of the keys and roles of a message, such as `{"role_tag": "role", "user_tag": "user"}`.
        ranking: whether the records are preferences, which training does not read.
        other: keys of the entry that are not applied.
    """

    name: str
    file: str | None
    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    ranking: bool = False
    other: tuple[str, ...] = ()

    def converted(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield rows whose records have the keys of Alpaca or ShareGPT."""
        for row in rows:
            yield replace(row, value=self._record(row.value)) if isinstance(row.value, dict) else row

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        renamed = {named: _COLUMNS[column] for column, named in self.columns.items() if column in _COLUMNS}
        if renamed.keys() == {self.columns.get("prompt")}:  # nothing is asked or answered: plain text
            renamed = dict.fromkeys(renamed, "text")
        record = {renamed.get(key, key): value for key, value in record.items()}
        turns = record.get("conversations")
        if self.tags and isinstance(turns, list):
            record["conversations"] = [self._turn(turn) if isinstance(turn, dict) else turn for turn in turns]
        return record

    def _turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        role, content = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        speakers = {self.tags.get(f"{name}_tag", speaker): speaker for name, speaker in _SPEAKERS.items()}
        rest = {key: value for key, value in turn.items() if key not in (role, content)}
        return {**rest, "from": speakers.get(str(turn.get(role)), turn.get(role)), "value": turn.get(content)}


def entries(folder: Path) -> list[Entry]:
    """Return the data sets that LLaMA-Factory's `dataset_info.json` in a folder names; none if it is no such file."""
    listing = folder / "dataset_info.json"
    if not listing.is_file():
        return []
    with suppress(UserError):  # not JSON, or not an object of objects: another program's
        found = read_json(listing, dict[str, dict[str, Any]])
        if all(entry.keys() & {*_PLACES} for entry in found.values()):
            return [_entry(folder, name, entry) for name, entry in found.items()]
    return []


def _entry(folder: Path, name: str, entry: dict[str, Any]) -> Entry:
    file, columns, tags = (entry.get(key) for key in ("file_name", "columns", "tags"))
    is_there = isinstance(file, str) and (folder / file).exists()
    return Entry(
        name,
        file if is_there and (folder / str(file)).resolve().is_relative_to(folder.resolve()) else None,
        columns if isinstance(columns, dict) else {},
        tags if isinstance(tags, dict) else {},
        bool(entry.get("ranking")),
        tuple(sorted(entry.keys() - _APPLIED)),
    )


def chosen(spec: str, known: Sequence[Entry], name: str | None, note: Note) -> list[Entry]:
    """Return the data set `name` of the folder `spec`, or all that are there and can be trained on.

    Raises:
        UserError: there is no such data set, or none; its data are elsewhere, or preferences; or its entry has a key
            that is not applied.
    """
    usable = [entry for entry in known if entry.file is not None and not entry.ranking]
    if name is not None:
        usable = [entry for entry in usable if entry.name == name]
    if not usable:
        names = [entry.name for entry in known if entry.file is not None and not entry.ranking]
        raise UserError(
            f"{spec!r} holds no data set {'to train on' if name is None else shown(name)}; dataset_info.json names "
            f"{', '.join(names) or 'none'} whose data are there.{suggest(name or '', names)} To read one: {spec}:NAME"
        )
    if other := next((entry for entry in usable if entry.other), None):
        raise UserError(
            f"dataset_info.json of {spec!r} sets {', '.join(other.other)} for {other.name!r}, which is not applied; "
            f"name the file {other.file} itself, or another data set: {spec}:NAME"
        )
    if rest := [entry.name for entry in known if entry not in usable]:
        note(
            f"{spec!r}: of dataset_info.json {', '.join(entry.name for entry in usable)} is read; passed over: "
            f"{', '.join(first_of(rest))}"
        )
    return usable
