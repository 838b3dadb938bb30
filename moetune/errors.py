"""`UserError` and `DoesNotFit`; `reading` turns readers' errors into `UserError`; notes; text helpers."""

import difflib
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

_MOST_BYTES = 4000
_LONGEST_WORD = 100  # characters of a word for which `suggest` looks for a near name


class UserError(Exception):
    """Bad input. The message names the wrong value and the remedy; the command line prints it and exits with 2.

    A message may have several lines, one for each problem. Control characters are escaped; 4,000 bytes are shown.
    """

    def __init__(self, message: str) -> None:
        text = printable(message)
        written = text.encode()
        if len(written) > _MOST_BYTES:
            kept = written[: _MOST_BYTES - 50].decode(errors="ignore")
            text = f"{kept} … {len(written) - _MOST_BYTES + 50:,} more bytes"
        super().__init__(text)


class DoesNotFit(Exception):
    """Memory ran out during training, or a command would need more than there is. The command line exits with 1.

    Attributes:
        found: the report of the failure (watch/out_of_memory.py), or the prediction, as JSON values for programs.
    """

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(printable(message))
        self.found = found


@contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Convert any error in the body of the `with` into a `UserError` "`what` cannot be read: …".

    The body should only read. Readers of other libraries raise exceptions of all kinds; tokenizers written in Rust
    raise a `PanicException`, which is no `Exception`. `UserError` and Ctrl-C pass unchanged. `remedy` is appended to
    the message.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt and SystemExit
        raise UserError(f"{what} cannot be read: {one_line(error)}{remedy and '; '}{remedy}") from error


def printable(text: str) -> str:
    """Return `text` with control characters, which a terminal would execute, and lone surrogates escaped."""
    if text.isprintable():  # raises for bytes, which click passes to test a stream
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def note(*texts: str) -> None:
    """Print a line that begins with `note: `, or with a text's own `warning: `, on stderr for each of the texts, with
    control characters escaped."""
    for text in texts:
        print("" if text.startswith("warning: ") else "note: ", printable(text), sep="", file=sys.stderr)


note_once = cache(note)
"""`note` of texts that a process prints once, however often it meets their cause."""


@contextmanager
def time_limit(what: str, seconds: float = 10.0) -> Iterator[None]:
    """Raise `UserError` if the body of the `with`, which the message calls `what`, takes longer than `seconds`. A limit
    around it goes on.

    The limit is enforced by SIGALRM, which only the main thread receives; on another thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise UserError(f"{what}: no end after {seconds:g} s; simplify it")

    begun, before = time.monotonic(), signal.signal(signal.SIGALRM, late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3))


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Append the message of a `UserError` raised within the `with` block to `problems` in place of raising it."""
    try:
        yield
    except UserError as error:
        problems.append(str(error))


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one `UserError` with all distinct problems, one on each line; return if there are none."""
    if lines := dict.fromkeys(problems):
        raise UserError("\n".join(lines))


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the name in `known` that is nearest to `word`; `""` if none is near."""
    spelled = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), spelled, n=1) if len(word) <= _LONGEST_WORD else []
    return f" Did you mean {spelled[nearest[0]]!r}?" if nearest else ""


def counted(count: int, noun: str) -> str:
    """Return a number with a noun, whose plural ends in s: `counted(2000, "expert")` is `"2,000 experts"`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_of(lines: Sequence[str], most: int = 10) -> list[str]:
    """Return the first `most` lines, and `and N more` if there are more."""
    return [*lines[:most], f"and {len(lines) - most:,} more"] if len(lines) > most else [*lines]


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, up to 300 characters; the error's type if it has no message.

    A line that ends with a colon is joined with the next, which it introduces.
    """
    reason = getattr(error, "strerror", None) if isinstance(error, OSError) else None
    first, *rest = (str(reason or error).strip() or type(error).__name__).splitlines()
    return (f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first)[:300]


def shown(value: object, most: int = 80) -> str:
    """Return `repr(value)`, cut to `most` characters; `<type name>` if `repr` fails."""
    try:
        text = repr(value)
    except Exception:  # such as an integer of five thousand digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."
