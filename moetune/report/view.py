"""The answer of a command as text: one description, printed on a terminal (terminal.py) and as a page (page.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Table:
    """Rows of text. A cell may hold several lines; all but the first are faint.

    Attributes:
        headings: of the columns; one that begins with `>` is of numbers, which are right-aligned and never wrapped.
        totals: bold rows below the others.
    """

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Records:
    """Texts of data as tokens, each with whether it carries loss."""

    records: Sequence[Sequence[tuple[str, bool]]]


@dataclass(frozen=True)
class Section:
    """A titled table, list of lines, text as it is (a str), or records.

    Attributes:
        is_detail: on a terminal only with `--verbose`, on a page folded.
    """

    title: str
    body: Table | Records | Sequence[str] | str
    is_detail: bool = False


@dataclass(frozen=True)
class View:
    """A whole answer.

    Attributes:
        verdict: the answer in one line; `outcome` colours it.
        about: names and values of what was looked at.
    """

    title: str
    verdict: str
    outcome: Literal["yes", "tight", "no"] | None = None
    lines: Sequence[str] = ()
    about: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
