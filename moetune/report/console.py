"""Streams that escape control characters in data."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from moetune.errors import UserError, one_line, printable

_SAID = set[str]()
"""Messages that transformers has logged."""
_BARS = re.compile(r"(\r|\x1b\[A)")  # moves the cursor back, in other libraries' progress bars


class _Terminal(Console):
    """A rich console that escapes control characters in what it prints, except its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class _Stream:
    """A wrapper of a standard stream that writes `shown(text)` in place of each text, to escape control characters."""

    def __init__(self, stream: Any, shown: Callable[[str], str]) -> None:
        self._stream, self._shown = stream, shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def rich_proxied_file(self) -> "_Stream":
        """The stream without escaping, to which rich writes colour codes and text that `_Terminal` has escaped."""
        return type(self)(self._stream, str)

    def write(self, text: str) -> int:
        return self._stream.write(self._shown(text))


class _Stdout(_Stream):
    """A wrapper of stdout that raises `UserError` if writing fails, as on a full disk."""

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
    """Escape control characters except those with which progress bars move the cursor back; drop what transformers has
    logged before, which it does with each model that is built."""
    if text.startswith("[transformers] "):
        if text in _SAID:
            return ""
        _SAID.add(text)
    return text if text.isprintable() else "".join(p if _BARS.fullmatch(p) else printable(p) for p in _BARS.split(text))


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a rich console that prints text literally, each line as one; with `quiet` it prints nothing."""
    return _Terminal(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False, soft_wrap=True)


def quieten() -> None:
    """Prepare this process's output; may be called more than once.

    - Wrap `sys.stdout` and `sys.stderr` to escape control characters, and characters that the encoding lacks.
    - Replace a closed stream by one that discards its output.
    - Switch off tqdm's progress bars if stderr is no terminal.
    - Drop bitsandbytes' message about a CPU kernel that moetune does not use. Other libraries' warnings stay.
    """
    for name, shown in (("stdout", printable), ("stderr", _on_stderr)):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            stream = open(os.devnull, "w")  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")
        if not isinstance(stream, _Stream):
            stream = (_Stdout if name == "stdout" else _Stream)(stream, shown)
        setattr(sys, name, stream)
    if not sys.stderr.isatty():  # in a log file, each frame of a progress bar would be a line
        os.environ.setdefault("TQDM_DISABLE", "1")
    # On import, bitsandbytes logs that an optional CPU kernel is missing, which moetune does not use.
    about_kernel = "kernels-community"
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: about_kernel not in str(record.msg))
