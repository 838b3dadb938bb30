"""The exceptions a user is meant to see, the boundary that makes one of bad input, and what goes into its message."""

import difflib
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MOST_BYTES = 4000
_LONGEST_WORD = 100  # that could be a name misspelled


class UserError(Exception):
    """Bad input. The message names the value that is wrong and the remedy; the command line exits with 2.

    A message may hold several lines, one problem each, so that a user mends a file in one go. It is cut where it would
    fill a screen many times, and can be printed whatever is quoted in it.
    """

    def __init__(self, message: str) -> None:
        text = printable(message)
        written = text.encode()
        if len(written) > _MOST_BYTES:
            kept = written[: _MOST_BYTES - 50].decode(errors="ignore")
            text = f"{kept} … {len(written) - _MOST_BYTES + 50:,} more bytes"
        super().__init__(text)


class DoesNotFit(Exception):
    """Memory ran out. The message is for people; the command line exits with 1: it ran, and the answer is no.

    Attributes:
        found: the same for programs.
    """

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(printable(message))
        self.found = found


@contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """The boundary around what a user or a file gives: whatever fails in it becomes a `UserError` that names it.

    Readers of others raise what they like, tokenizers in Rust even what is no `Exception`. So the body should read, and
    do nothing else: an error of ours in it would be taken for the user's. The cause is kept, for `--debug`.
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
    """The text with control characters and halves of characters written out: a terminal would obey them."""
    return (
        text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    )


@contextmanager
def time_limit(what: str, seconds: float = 10.0) -> Iterator[None]:
    """Raise `UserError` if the body, a match of somebody's regular expression say, takes longer: on the main thread,
    the only one that hears signals."""
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
    """`1 expert`, `2,000 experts`: a number of things that have a plural in s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """The first line of what an error says, or what it is."""
    said = getattr(error, "strerror", None) if isinstance(error, OSError) else None
    return (str(said or error).strip() or type(error).__name__).splitlines()[0][:300]


def shown(value: object, most: int = 80) -> str:
    """A value as Python writes it, cut to be read; of what cannot be written its type."""
    try:
        text = repr(value)
    except Exception:  # an integer of five thousand digits, a list in itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."
