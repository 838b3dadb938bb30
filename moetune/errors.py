"""The one exception a user is meant to see, and the hint that goes into its message."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message names the value that is wrong and the remedy; the command line exits with 2.

    A message may hold several lines, one problem each, so that a user mends a file in one go.
    """


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the known word nearest to `word`, or `""` if none is near."""
    spelled = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), spelled, n=1)
    return f" Did you mean {spelled[nearest[0]]!r}?" if nearest else ""


def one_line(error: BaseException) -> str:
    """The first line of what an error says, or what it is."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
