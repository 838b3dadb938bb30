"""What is read of a data set: its splits, and sources whose rows are records."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from datasets import Split
from datasets.data_files import SPLIT_KEYWORDS

from moetune.errors import UserError, suggest

SPLIT_NAMES = {name for names in SPLIT_KEYWORDS.values() for name in names}
"""Usual names of splits: train, dev, test, …"""
_TRAIN, _HELD_OUT = SPLIT_KEYWORDS[Split.TRAIN], SPLIT_KEYWORDS[Split.VALIDATION] + SPLIT_KEYWORDS[Split.TEST]
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


def choose_split(name: str, splits: Collection[str], asked: str | None, held_out: bool) -> str:
    """Return the split of the data set `name` to read.

    Args:
        splits: names of those that it has.
        asked: the split that is named; None for the default: `train`, or for evaluation (`held_out`) `validation`, else
            `test`. The only one of a data set needs no name, unless training would read one for evaluation.

    Raises:
        UserError: there is no such split; the message lists those that there are.
    """
    wanted = (asked,) if asked is not None else _HELD_OUT if held_out else _TRAIN
    for split in wanted:
        if split in splits:
            return split
    if asked is None and len(splits) == 1 and (only := next(iter(splits))) not in _HELD_OUT:
        return only
    what, known = asked or ("validation" if held_out else "train"), ", ".join(splits)
    key = f"write {name}:SPLIT" + ("" if held_out else " or set data.split")
    raise UserError(f"{name!r} has no split {what!r}; it has {known}.{suggest(what, splits)} To read one, {key}")
