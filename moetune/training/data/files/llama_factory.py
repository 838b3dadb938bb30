"""LLaMA-Factory's folders: `dataset_info.json` with data sets, files and keys."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetune.errors import UserError, first_of, shown, suggest
from moetune.json_files import read_json
from moetune.training.data.files.source import Note, Row

_PLACES = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
"""Keys of which every entry has one: where its data are."""
_APPLIED = _PLACES | {"formatting", "columns", "tags", "ranking"}
_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "history": "history",
    "messages": "conversations", "system": "system", "tools": "tools",
    **{key: key for key in ("images", "videos", "audios", "chosen", "rejected", "kto_tag")},
}  # fmt: skip
"""LLaMA-Factory's name of a column -> the key of Alpaca's or ShareGPT's records."""
_SPEAKERS = {
    "user": "human", "assistant": "gpt", "observation": "observation", "function": "function_call", "system": "system",
}  # fmt: skip
"""Role in a name such as `user_tag` -> the speaker in ShareGPT's records."""


Entry = dict[str, Any]
"""A data set, as `dataset_info.json` describes it."""


def entries(folder: Path) -> dict[str, Entry]:
    """Return the data sets that LLaMA-Factory's `dataset_info.json` in a folder names; none if it is no such file."""
    with suppress(UserError):  # not there, not JSON, or not an object of objects: another program's
        listing = read_json(folder / "dataset_info.json", dict[str, Entry])
        if all(entry.keys() & _PLACES for entry in listing.values()):
            return listing
    return {}


def chosen(spec: str, folder: Path, known: Mapping[str, Entry], name: str | None, note: Note) -> list[Entry]:
    """Return the data set `name` of a folder, which the user calls `spec`, or all that are there and can be trained on.

    Raises:
        UserError: there is no such data set, or none; its data are elsewhere, or preferences; or its entry has a key
            that is not applied.
    """
    readable = {key: entry for key, entry in known.items() if _is_there(folder, entry) and not entry.get("ranking")}
    usable = {key: entry for key, entry in readable.items() if name in (None, key)}
    if not usable:
        raise UserError(
            f"{spec!r} holds no data set {'to train on' if name is None else shown(name)}; dataset_info.json names "
            f"{', '.join(readable) or 'none'} whose data are there.{suggest(name or '', readable)} To read one: "
            f"{spec}:NAME"
        )
    for key, entry in usable.items():
        if unread := entry.keys() - _APPLIED:
            raise UserError(
                f"dataset_info.json of {spec!r} sets {', '.join(sorted(unread))} for {key!r}, which is not applied; "
                f"name the file {entry['file_name']} itself, or another data set: {spec}:NAME"
            )
    if rest := [key for key in known if key not in usable]:
        note(f"{spec!r}: of dataset_info.json {', '.join(usable)} is read; passed over: {', '.join(first_of(rest))}")
    return [*usable.values()]


def _is_there(folder: Path, entry: Entry) -> bool:
    file = entry.get("file_name")
    path = folder / file if isinstance(file, str) else None
    return path is not None and path.exists() and path.resolve().is_relative_to(folder.resolve())


def converted(entry: Entry, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of a data set with the keys and speakers of Alpaca or ShareGPT in their records."""
    columns, tags = (value if isinstance(value := entry.get(key), dict) else {} for key in ("columns", "tags"))
    names = {named: _COLUMNS[column] for column, named in columns.items() if column in _COLUMNS}
    if names.keys() == {columns.get("prompt")}:  # nothing is asked or answered: plain text
        names = dict.fromkeys(names, "text")
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    speakers = {tags.get(f"{name}_tag", speaker): speaker for name, speaker in _SPEAKERS.items()}

    def turn(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        rest = {key: value for key, value in given.items() if key not in (role, content)}
        return {**rest, "from": speakers.get(str(given.get(role)), given.get(role)), "value": given.get(content)}

    for row in rows:
        if isinstance(row.value, dict):
            # what `columns` leaves out is not read, though it may have the name of a key that is
            other = " (not in columns)" if columns else ""
            record = {names.get(key, f"{key}{other}"): value for key, value in row.value.items()}
            if tags and isinstance(record.get("conversations"), list):
                record["conversations"] = [*map(turn, record["conversations"])]
            row = replace(row, value=record)
        yield row
