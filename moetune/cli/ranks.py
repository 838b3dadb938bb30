"""A command that runs on several ranks: it starts itself once for each."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from moetune.parallel.launch import start_ranks


def exit_as_ranks(count: int, interrupted: str) -> NoReturn:
    """Runs this command on `count` ranks of this machine, and ends as they do.

    Args:
        interrupted: what is said if the keyboard ends it.
    """
    try:
        code = start_ranks([sys.executable, "-m", "moetune", *sys.argv[1:]], count)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        raise
    raise typer.Exit(code)
