"""What is read of a data set: sources, whose rows are records."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Note = Callable[[str], None]
"""Takes a sentence about what a data set holds and is not read."""


@dataclass(frozen=True)
class Row:
    """A record, or the reason why it could not be read.

    Attributes:
        number: number of the record's line or row, from 1.
        value: the record as Python values; None if it could not be read.
        problem: why the record could not be read; None if it was read.
    """

    number: int
    value: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """A file or data set, whose rows can be iterated over once.

    Attributes:
        name: the source's name in messages, such as `data.jsonl`.
        unit: what `Row.number` counts, for messages such as `line 3`.
        rows: a record, or the reason why it cannot be read, in each `Row`.
    """

    name: str
    unit: Literal["line", "row", "record"]
    rows: Iterable[Row]
