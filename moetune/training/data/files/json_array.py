"""Parse a JSON array, or one in an object, from a file one value at a time: the file may be larger than memory."""

import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from moetune.json_files import UNIQUE_KEYS

_BYTES = 2**16
_MARGIN = 16  # characters at the end of the text that may be an incomplete word, number or escape
_WHITE = re.compile(r"[ \t\n\r]*")


class JsonArray:
    """Iterates over the values of a JSON array, holding one value in memory at a time.

    Iteration raises the errors of `json.loads`, and `DuplicateKeyError`. The positions in a `JSONDecodeError` refer to
    the part of the file in memory; `where` converts them to positions in the file.

    Args:
        handle: binary file, at its beginning, whose first character after white space is `[`, or with `key` `{`.
        key: of the object in the file, whose value is the array; None if the file is the array itself.
    """

    def __init__(self, handle: IO[bytes], key: str | None = None) -> None:
        self._file = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
        self._text, self._at, self._ended = "", 0, False
        self._lines = self._column = 0  # lines, and columns of the last line, before the text
        self._key = key

    def __iter__(self) -> Iterator[Any]:
        if self._key is None:
            yield from self._items()
        else:
            for key in self._keys():
                if key == self._key:
                    yield from self._items()
                else:
                    self._value()
        if self._skip():
            raise json.JSONDecodeError("Extra data", self._text, self._at)

    def keys(self) -> dict[str, bool]:
        """Return key -> whether its value is a list of objects, of the only value in the file, an object; empty if it
        holds another value or more than one. Of a damaged object these are the keys before the damage."""
        keys: dict[str, bool] = {}
        try:
            if self._skip() != "{":
                return {}
            for key in self._keys():
                keys[key] = False
                if self._skip() == "[":
                    for value in self._items():
                        keys[key] = keys[key] or isinstance(value, dict)
                else:
                    self._value()
            return {} if self._skip() else keys
        except (ValueError, RecursionError):
            return keys

    def _items(self) -> Iterator[Any]:
        for _ in self._members("]"):
            yield self._value()

    def _keys(self) -> Iterator[str]:
        """Yield each key of an object; what iterates reads its value before the next."""
        for _ in self._members("}"):
            if self._skip() != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, self._at)
            key = self._value()
            if self._skip() != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, self._at)
            self._at += 1
            self._skip()
            yield key

    def _members(self, end: str) -> Iterator[None]:
        """Pass the bracket at which an array or an object begins, and yield before each of its members."""
        self._skip()
        self._at += 1
        mark = self._skip()
        while mark != end:
            yield
            mark = self._skip()
            if mark == ",":
                self._at += 1
                self._skip()
            elif mark != end:
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, self._at)
        self._at += 1

    def where(self, error: json.JSONDecodeError) -> tuple[int, int]:
        """Return the (line, column) in the file, both from 1, at which a parse error occurred."""
        return error.lineno + self._lines, error.colno + (self._column if error.lineno == 1 else 0)

    def _value(self) -> Any:
        while True:
            try:
                value, end = UNIQUE_KEYS.raw_decode(self._text, self._at)
                if self._ended or end < len(self._text) - _MARGIN:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _MARGIN
                if self._ended or not is_cut:
                    raise
            self._more()

    def _skip(self) -> str:
        """Skip white space; return the next character, which is not consumed, or "" at the end of the file."""
        while (white := _WHITE.match(self._text, self._at)) and white.end() == len(self._text) and not self._ended:
            self._at = white.end()
            self._more()
        self._at = white.end() if white else self._at
        return self._text[self._at : self._at + 1]

    def _more(self) -> None:
        """Discard consumed text, and read at least as much as is left, so that a long value takes few attempts."""
        lines = self._text.count("\n", 0, self._at)
        self._column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + (0 if lines else self._column)
        self._lines += lines
        rest = self._text[self._at :]
        more = self._file.read(max(_BYTES, len(rest)))
        self._text, self._at, self._ended = rest + more, 0, not more
