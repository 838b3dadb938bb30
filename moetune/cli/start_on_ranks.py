"""Start a command on each rank, and join the ranks into a process group."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from moetune.cli.options import heavy_imports
from moetune.config.schema import ParallelConfig
from moetune.parallel.start_ranks import is_quiet, start_ranks, was_launched

if TYPE_CHECKING:
    from moetune.parallel.ranks import Ranks


def starts_ranks(parallel: ParallelConfig) -> bool:
    """Return whether the run has several ranks and this process is their launcher rather than one of them."""
    return parallel.ranks > 1 and not was_launched()


@contextmanager
def on_ranks(parallel: ParallelConfig, remedy: str, options: Sequence[str] = ()) -> Iterator[Ranks]:
    """Run the body on every rank of a run, each in a process of its own, and yield the ranks, of which this is one.

    The launching process never runs the body: it starts this command line again once for each rank, waits for them, and
    exits with their exit code (`typer.Exit`). A run with one rank runs the body in this process.

    Args:
        remedy: how to continue; printed on an interruption, which exits with 128 + the signal's number.
        options: arguments that the ranks get besides those of this command line.
    """
    try:
        if starts_ranks(parallel):
            raise typer.Exit(start_ranks([sys.executable, "-m", "moetune", *sys.argv[1:], *options], parallel.ranks))
        with heavy_imports():
            from moetune.parallel.join import joined
            from moetune.run.dtypes import this_device
        with joined(parallel, this_device()) as ranks:
            yield ranks
    except KeyboardInterrupt as ended:
        if not is_quiet():
            print(f"interrupted; {remedy}", file=sys.stderr)
        raise typer.Exit(128 + getattr(ended, "number", signal.SIGINT)) from None
