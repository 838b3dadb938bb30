"""The terminal, as everything here writes on it."""

import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from moetune.errors import UserError, one_line, printable


class _Terminal(Console):
    """Writes out control characters: a terminal would obey those of a record or of a name."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class _Stdout:
    """stdout that writes out control characters, and whose errors say that they are its own."""

    def __init__(self, stream: Any, shown: Callable[[str], str] = printable) -> None:
        self._stream, self._shown = stream, shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def rich_proxied_file(self) -> "_Stdout":
        """Where rich writes its colours: `_Terminal` has seen to the rest."""
        return _Stdout(self._stream, str)

    def write(self, text: str) -> int:
        return self._try(self._stream.write, self._shown(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., Any], *given: str) -> Any:
        try:
            return act(*given)
        except (OSError, ValueError) as error:
            raise UserError(f"stdout cannot be written: {one_line(error)}") from error


def note(text: str) -> None:
    """Says on stderr what a user should know."""
    print(printable(f"note: {text}"), file=sys.stderr)


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints what it is given: in a path, neither `[/]` nor `:key:` stands for something else."""
    return _Terminal(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def quieten() -> None:
    """Keeps off stderr what other libraries have to say that helps nobody here; their warnings stay. Lets stdout and
    stderr take any text, whatever their encoding."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    if not isinstance(sys.stdout, _Stdout):
        sys.stdout = _Stdout(sys.stdout)
    if not sys.stderr.isatty():  # in a log file, a progress bar is a line a frame
        os.environ.setdefault("TQDM_DISABLE", "1")
    # bitsandbytes says on import that it lacks an optional CPU kernel, which this package does not use.
    about_kernel = "kernels-community"
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: about_kernel not in str(record.msg))
