"""A command that runs on several ranks starts itself once for each."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from moetune.cli.options import heavy_imports
from moetune.config.schema import ParallelConfig
from moetune.parallel.launch import is_quiet, start_ranks, was_launched

if TYPE_CHECKING:
    from moetune.parallel.ranks import Ranks


def starts_ranks(parallel: ParallelConfig) -> bool:
    """Return whether this process starts the ranks, and is none of them."""
    return parallel.ranks > 1 and not was_launched()


@contextmanager
def on_ranks(parallel: ParallelConfig, remedy: str) -> Iterator[Ranks]:
    """Run the body as one of the run's ranks. The process that starts them ends as they do instead.

    Args:
        remedy: what to do after an interruption; printed then.
    """
    try:
        if starts_ranks(parallel):
            raise typer.Exit(start_ranks([sys.executable, "-m", "moetune", *sys.argv[1:]], parallel.ranks))
        with heavy_imports():
            from moetune.parallel.join import joined
            from moetune.run.dtypes import this_device
        with joined(parallel, this_device()) as ranks:
            yield ranks
    except KeyboardInterrupt as ended:
        if not is_quiet():
            print(f"interrupted; {remedy}", file=sys.stderr)
        raise typer.Exit(128 + getattr(ended, "number", signal.SIGINT)) from None
