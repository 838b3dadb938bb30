"""Rows of text files: JSON (lines, an array, or an object of arrays), CSV, plain text."""

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator
from typing import IO

from moetune.errors import UserError, shown
from moetune.json_files import UNIQUE_KEYS, DuplicateKeyError
from moetune.training.data.files.json_array import JsonArray
from moetune.training.data.files.opening import type_of
from moetune.training.data.files.source import Note, Row, Source
from moetune.training.data.files.splits import SPLIT_NAMES, choose_split

_UTF8_MARK = b"\xef\xbb\xbf"
_SOME_BYTES = 2**16
_OF_RECORDS = {"messages", "conversations", "prompt", "completion", "chosen", "rejected", "instruction", "text"}
"""Keys of records. An object in a file of its own that has none of them may hold lists of records instead."""
Open = Callable[[], IO[bytes]]


def json_source(name: str, open_: Open, split: str | None, held_out: bool, note: Note) -> Source:
    """Return the records of a JSON file: one on each line, an array, or an array in an object, such as `{"train": […],
    "test": […]}`, of which `choose_split` chooses with `split` and `held_out`.

    Raises:
        UserError: there is no such split.
    """
    with open_() as handle:
        first = _first(handle)
    if first == b"[":
        choose_split(name, ["train"], split, held_out)
        return Source(name, "record", _array_rows(JsonArray(open_())))
    keys = JsonArray(open_()).keys() if first == b"{" else {}
    lists = [key for key, holds_objects in keys.items() if holds_objects]
    # In a file for lines an object is one line, and so a record, unless its lists are named like splits.
    may_hold_splits = type_of(name) == ".json" or {split, *SPLIT_NAMES} & {*lists}
    if not lists or not may_hold_splits or _OF_RECORDS & keys.keys():
        choose_split(name, ["train"], split, held_out)
        return Source(name, "line", _json_rows(open_()))
    chosen = choose_split(name, lists, split, held_out)
    if others := [key for key in keys if key != chosen]:
        note(f"{name!r}: the list {shown(chosen)} is read; passed over: {', '.join(map(shown, others))}")
    return Source(name, "record", _array_rows(JsonArray(open_(), chosen)))


def _first(handle: IO[bytes]) -> bytes:
    """Return the first byte of a file that is no white space; b"" if there is none."""
    some = handle.read(_SOME_BYTES).removeprefix(_UTF8_MARK)
    while some and not some.strip():
        some = handle.read(_SOME_BYTES)
    return some.strip()[:1]


def _array_rows(array: JsonArray) -> Iterator[Row]:
    """Yield the values of a JSON array; a syntax error is reported as the problem of the record that it is in."""
    number = 0
    try:
        for number, value in enumerate(array, 1):
            yield Row(number, value)
    except (ValueError, RecursionError) as error:
        where = array.where(error) if isinstance(error, json.JSONDecodeError) else (1, 1)
        yield Row(number + 1, problem=_not_json(error, *where))


def _json_rows(handle: IO[bytes]) -> Iterator[Row]:
    """Yield the record of each line.

    Only a line feed ends a line, because JSON strings may contain other line separators, such as U+2028.
    """
    with handle:
        read = 0
        for number, raw in enumerate(handle, 1):
            line = raw.removeprefix(_UTF8_MARK).strip() if number == 1 else raw.strip()
            if not line:
                continue
            try:
                yield Row(number, UNIQUE_KEYS.decode(line.decode()))
            except (ValueError, RecursionError) as error:
                if not read and isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc) and any(handle):
                    problem = "the record goes on in the next line; write each on a line of its own, as `jq -c .` does"
                    yield Row(number, problem=problem)
                    return
                yield Row(number, problem=_not_json(error, column=getattr(error, "colno", 1)))
            read += 1


def _not_json(error: Exception, line: int = 1, column: int = 1) -> str:
    if isinstance(error, DuplicateKeyError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return "not valid UTF-8"
    if not isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error}"
    return f"not valid JSON: {error.msg} ({f'line {line}, ' if line > 1 else ''}column {column})"


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
