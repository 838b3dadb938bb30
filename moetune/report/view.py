"""`View`, `ViewSection`, `Table`: an answer as data, for terminal.py and page.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Table:
    """A table of text. A cell may have several lines, of which all but the first are printed faint.

    Attributes:
        headings: headings of the columns. A leading `>` marks a column of numbers, right-aligned and never wrapped.
        totals: further rows, printed bold below the others.
    """

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Records:
    """Examples of training data: for each record its tokens, as (text, whether the token carries loss)."""

    records: Sequence[Sequence[tuple[str, bool]]]


@dataclass(frozen=True)
class ViewSection:
    """A titled part of a view.

    Attributes:
        title: heading above the body.
        body: a table, records, a list of lines (a sequence of str), or preformatted text (a str).
        is_detail: printed on a terminal only with `--verbose`, collapsed in a page.
    """

    title: str
    body: Table | Records | Sequence[str] | str
    is_detail: bool = False


@dataclass(frozen=True)
class View:
    """The answer of a command.

    Attributes:
        title: heading of a page; a terminal does not show it.
        verdict: the answer in one line.
        outcome: whether the answer is good, which selects the verdict's colour; None: neither good nor bad, no colour.
        lines: sentences below the verdict.
        more: what a terminal says of details that it does not show.
        about: (label, text) pairs that describe what the answer is about.
        sections: tables and lists below.
    """

    title: str
    verdict: str
    outcome: Literal["yes", "tight", "no"] | None = None
    lines: Sequence[str] = ()
    about: Sequence[tuple[str, str]] = ()
    sections: Sequence[ViewSection] = ()
    more: str = "--verbose: what is alive, single allocations, loading, what is assumed"
