"""Rows of text files: JSON (lines, array, object of arrays), CSV, plain text."""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from moetune.errors import UserError, shown
from moetune.json_files import UNIQUE_KEYS, DuplicateKeyError
from moetune.training.data.files.opening import opened, type_of
from moetune.training.data.files.source import SPLIT_NAMES, Note, Row, Source, choose_split

_UTF8_MARK = b"\xef\xbb\xbf"
_MOST_BYTES = 2**32
"""Of a JSON file that is one value, which is held in memory."""
_BEFORE, _BETWEEN = (re.compile(rf"[ \t\n\r]*{mark}[ \t\n\r]*") for mark in (r"\[[ \t\n\r]*(\]?)", r"([,\]]?)"))
"""What stands before the first value of a JSON array, and between or behind others."""
_OF_RECORDS = {"messages", "conversations", "prompt", "completion", "chosen", "rejected", "instruction", "text"}
"""Keys of records. An object in a file of its own that has none of them may hold lists of records instead."""


def json_source(name: str, path: Path, split: str | None, held_out: bool, note: Note) -> Source:
    """Return the records of a JSON file: one on each line, an array, or an array in an object, such as `{"train": […],
    "test": […]}`, of which `choose_split` chooses with `split` and `held_out`.

    Raises:
        UserError: there is no such split; or the file is an object of more than `_MOST_BYTES`.
    """
    with opened(path, name) as handle:
        lines = filter(None, (line.removeprefix(_UTF8_MARK).strip() for line in handle))
        first, is_only = next(lines, b""), next(lines, None) is None
    if first.startswith(b"["):
        choose_split(name, ["train"], split, held_out)
        return Source(name, "record", _array_rows(name, path))
    try:
        whole = _object(name, path, first, is_only) if first.startswith(b"{") else {}
    except (ValueError, RecursionError) as error:
        is_more = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
        goes_on = "the record goes on in the next line; write each on a line of its own, as `jq -c .` does"
        return Source(name, "record", [Row(1, problem=goes_on if is_more else _not_json(error))])
    lists = [
        key for key, value in whole.items() if isinstance(value, list) and any(isinstance(item, dict) for item in value)
    ]
    # In a file for lines an object is one line, and so a record, unless its lists are named like splits.
    may_hold_splits = type_of(name) == ".json" or {split, *SPLIT_NAMES} & {*lists}
    if not lists or not may_hold_splits or _OF_RECORDS & whole.keys():
        choose_split(name, ["train"], split, held_out)
        return Source(name, "line", [Row(1, whole)] if whole and not is_only else _json_rows(opened(path, name)))
    chosen = choose_split(name, lists, split, held_out)
    if passed_over := [key for key in whole if key != chosen]:
        note(f"{name!r}: the list {shown(chosen)} is read; passed over: {', '.join(map(shown, passed_over))}")
    return Source(name, "record", [Row(number, record) for number, record in enumerate(whole[chosen], 1)])


def _object(name: str, path: Path, first: bytes, is_only: bool) -> dict[str, Any]:
    """Return the object that is the whole of a file; an empty one if its `first` line is a record or damaged."""
    try:
        record: dict[str, Any] = UNIQUE_KEYS.decode(first.decode())
        return record if is_only else {}
    except (ValueError, RecursionError) as error:
        if is_only or not isinstance(error, json.JSONDecodeError) or error.pos < len(error.doc):
            return {}
    whole: dict[str, Any] = UNIQUE_KEYS.decode(_text(name, path))
    return whole


def _text(name: str, path: Path) -> str:
    with opened(path, name) as handle:
        raw = handle.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise UserError(
            f"{name!r} is one JSON value of more than {_MOST_BYTES:,} bytes; write each record on a line of its own, "
            "as `jq -c '.[]'` does"
        )
    return raw.removeprefix(_UTF8_MARK).decode()


def _array_rows(name: str, path: Path) -> Iterator[Row]:
    """Yield the values of a JSON array; a syntax error is reported as the problem of the record that it is in."""
    number = 0
    try:
        text = _text(name, path)
        match = _BEFORE.match(text)
        mark = match[1] or "," if match else ""
        while match and mark == ",":
            value, end = UNIQUE_KEYS.raw_decode(text, match.end())
            number += 1
            yield Row(number, value)
            match = _BETWEEN.match(text, end)
            mark = match[1] if match else ""
        if match and (mark != "]" or match.end() < len(text)):
            what = "Extra data" if mark == "]" else "Expecting ',' delimiter"
            raise json.JSONDecodeError(what, text, match.end())
    except (ValueError, RecursionError) as error:
        yield Row(number + 1, problem=_not_json(error))


def _json_rows(handle: IO[bytes]) -> Iterator[Row]:
    """Yield the record of each line.

    Only a line feed ends a line, because JSON strings may contain other line separators, such as U+2028.
    """
    with handle:
        for number, raw in enumerate(handle, 1):
            line = raw.removeprefix(_UTF8_MARK).strip() if number == 1 else raw.strip()
            if not line:
                continue
            try:
                yield Row(number, UNIQUE_KEYS.decode(line.decode()))
            except (ValueError, RecursionError) as error:
                yield Row(number, problem=_not_json(error))


def _not_json(error: Exception) -> str:
    if isinstance(error, DuplicateKeyError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return "not valid UTF-8"
    if not isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error}"
    return f"not valid JSON: {error.msg} ({f'line {error.lineno}, ' if error.lineno > 1 else ''}column {error.colno})"


def csv_rows(name: str, handle: IO[bytes], delimiter: str) -> Iterator[Row]:
    """Yield each row as an object, with the names in the first row as keys; empty fields become null.

    A file for commas is read with the semicolons of European Excel if its first line has these and no comma.

    Raises:
        UserError: two columns have the same name.
    """
    csv.field_size_limit(2**31 - 1)  # the default is 131,072 characters
    with io.TextIOWrapper(handle, encoding="utf-8-sig", newline="") as text:
        last = 1
        try:
            header = text.readline()
            delimiter = ";" if delimiter == "," and ";" in header and "," not in header else delimiter
            reader = csv.DictReader(itertools.chain([header], text), delimiter=delimiter, strict=True)
            refuse_twice(name, [column for column in reader.fieldnames or () if column])
            for value in reader:
                number, last = last + 1, reader.line_num  # a quoted field may hold line breaks
                if None in value:
                    names = len(reader.fieldnames or ())
                    yield Row(
                        number, problem=f"more fields than the first line names ({names}); quote those with commas"
                    )
                else:
                    yield Row(number, {column: field or None for column, field in value.items()})
        except (csv.Error, UnicodeDecodeError) as error:
            reason = "not valid UTF-8" if isinstance(error, UnicodeDecodeError) else f"not valid CSV: {error}"
            yield Row(last + 1, problem=reason)


def refuse_twice(name: str, columns: list[str]) -> None:
    """Raise `UserError` if two columns of the file `name` have the same name: only one of them could be read."""
    for column in columns:
        if columns.count(column) > 1:
            raise UserError(f"{name!r} has more than one column {shown(column)}; rename or remove all but one")


def text_rows(handle: IO[bytes]) -> Iterator[Row]:
    """Yield the whole of a text file as one record, `{"text": …}`; nothing if there is only white space."""
    with handle:
        raw = handle.read()
    try:
        text = raw.removeprefix(_UTF8_MARK).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        yield Row(line, problem="not valid UTF-8")
        return
    if text.strip():
        yield Row(1, {"text": text})
