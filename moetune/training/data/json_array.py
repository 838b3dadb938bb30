"""Parse a JSON array from a file one value at a time, so that the file may be larger than memory."""

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
        handle: binary file, at its beginning, whose first character after white space is `[`.
    """

    def __init__(self, handle: IO[bytes]) -> None:
        self._file = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
        self._text, self._at, self._ended = "", 0, False
        self._lines = self._column = 0  # lines, and columns of the last line, before the text

    def __iter__(self) -> Iterator[Any]:
        self._skip()  # to the opening bracket
        self._at += 1
        mark = self._skip()
        while mark != "]":
            yield self._value()
            mark = self._skip()
            if mark == ",":
                self._at += 1
                self._skip()
            elif mark != "]":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, self._at)
        self._at += 1
        if self._skip():
            raise json.JSONDecodeError("Extra data", self._text, self._at)

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
