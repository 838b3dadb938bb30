"""Exceptions with messages for users, the boundary that turns bad input into one, and parts of their messages."""

import difflib
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MOST_BYTES = 4000
_LONGEST_WORD = 100  # that could be a name misspelled


class UserError(Exception):
    """Bad input. The message names the wrong value and the remedy; the command line exits with 2.

    A message may hold several lines, one problem each. It is cut to `_MOST_BYTES`, and control characters are escaped.
    """

    def __init__(self, message: str) -> None:
        text = printable(message)
        written = text.encode()
        if len(written) > _MOST_BYTES:
            kept = written[: _MOST_BYTES - 50].decode(errors="ignore")
            text = f"{kept} … {len(written) - _MOST_BYTES + 50:,} more bytes"
        super().__init__(text)


class DoesNotFit(Exception):
    """Memory ran out. The command line exits with 1; `found` is the message for programs."""

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(printable(message))
        self.found = found


@contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Turn any error of the body, which should only read, into a `UserError` that names what is read.

    Readers of other libraries raise anything, tokenizers in Rust even what is no `Exception`. The cause is kept.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        raise UserError(f"{what} cannot be read: {one_line(error)}{remedy and '; '}{remedy}") from error


def printable(text: str) -> str:
    """Escape control characters, which a terminal would obey, and halves of surrogate pairs."""
    if text.isprintable():  # bytes raise here: click probes a stream with them
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


@contextmanager
def time_limit(what: str, seconds: float = 10.0) -> Iterator[None]:
    """Raise `UserError` if the body takes longer; on the main thread only, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise UserError(f"{what}: no end after {seconds:g} s; simplify it")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the known word nearest to `word`, or `""` if none is near."""
    spelled = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), spelled, n=1) if len(word) <= _LONGEST_WORD else []
    return f" Did you mean {spelled[nearest[0]]!r}?" if nearest else ""


def counted(count: int, noun: str) -> str:
    """Return `1 expert`, `2,000 experts`: a number and a noun with a plural in s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    said = getattr(error, "strerror", None) if isinstance(error, OSError) else None
    return (str(said or error).strip() or type(error).__name__).splitlines()[0][:300]


def shown(value: object, most: int = 80) -> str:
    """Return `repr` of a value, cut to `most` characters, or its type."""
    try:
        text = repr(value)
    except Exception:  # an integer of five thousand digits, a list in itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."
