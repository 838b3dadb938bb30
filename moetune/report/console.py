"""The terminal, as everything here writes on it."""

import logging
import os
import sys

from rich.console import Console


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints what it is given: in a path, neither `[/]` nor `:key:` stands for something else."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def quieten() -> None:
    """Keeps off stderr what other libraries have to say that helps nobody here; their warnings stay."""
    if not sys.stderr.isatty():  # in a log file, a progress bar is a line a frame
        os.environ.setdefault("TQDM_DISABLE", "1")
    # bitsandbytes says on import that it lacks an optional CPU kernel, which this package does not use.
    about_kernel = "kernels-community"
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: about_kernel not in str(record.msg))
