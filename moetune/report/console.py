"""The terminal, as everything here writes on it."""

import logging
import os
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from moetune.errors import printable


class _Terminal(Console):
    """Writes out control characters: a terminal would obey those of a record or of a name."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


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
    if not sys.stderr.isatty():  # in a log file, a progress bar is a line a frame
        os.environ.setdefault("TQDM_DISABLE", "1")
    # bitsandbytes says on import that it lacks an optional CPU kernel, which this package does not use.
    about_kernel = "kernels-community"
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: about_kernel not in str(record.msg))
