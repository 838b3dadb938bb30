"""stdout and stderr, as everything here writes on them: control characters are written out, because a terminal would
obey those of a record or of a name."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from moetune.errors import UserError, one_line, printable

_BARS = re.compile(r"(\r|\x1b\[A)")  # how other libraries' progress bars go back


class _Terminal(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class _Stream:
    """A standard stream that writes out control characters."""

    def __init__(self, stream: Any, shown: Callable[[str], str]) -> None:
        self._stream, self._shown = stream, shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def rich_proxied_file(self) -> "_Stream":
        """Where rich writes its colours: `_Terminal` has written out the rest."""
        return type(self)(self._stream, str)

    def write(self, text: str) -> int:
        return self._stream.write(self._shown(text))


class _Stdout(_Stream):
    """stdout, whose errors say that they are its own."""

    def write(self, text: str) -> int:
        return self._try(self._stream.write, self._shown(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., Any], *given: str) -> Any:
        try:
            return act(*given)
        except (OSError, ValueError) as error:
            raise UserError(f"stdout cannot be written: {one_line(error)}") from error


def _on_stderr(text: str) -> str:
    return text if text.isprintable() else "".join(p if _BARS.fullmatch(p) else printable(p) for p in _BARS.split(text))


def note(text: str) -> None:
    """Print on stderr what a user should know."""
    print(f"note: {text}", file=sys.stderr)


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints what it is given: in a path, neither `[/]` nor `:key:` stands for something else."""
    return _Terminal(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def quieten() -> None:
    """Keep off stderr what other libraries print that helps nobody here; their warnings stay. Let stdout and stderr
    take any text, whatever their encoding."""
    for name, shown in (("stdout", printable), ("stderr", _on_stderr)):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started us
            stream = open(os.devnull, "w")  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")
        if not isinstance(stream, _Stream):
            stream = (_Stdout if name == "stdout" else _Stream)(stream, shown)
        setattr(sys, name, stream)
    if not sys.stderr.isatty():  # in a log file, a progress bar is a line a frame
        os.environ.setdefault("TQDM_DISABLE", "1")
    # bitsandbytes says on import that it lacks an optional CPU kernel, which this package does not use.
    about_kernel = "kernels-community"
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: about_kernel not in str(record.msg))
