"""`calling`: call methods of a plan's `Search` as `map` does, in several processes."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from moetune.errors import UserError
from moetune.planning.search import Search
from moetune.report.console import quieten

_search: Search | None = None
"""The search of a worker process."""


@contextmanager
def calling(search: Search, processes: int) -> Iterator[Callable[[str, Iterable[Any]], Iterator[Any]]]:
    """Return a function that calls a method of a search, given its name, with each of several inputs, and yields the
    results in the order of the inputs, as they come.

    The processes are forks of this one. With a CUDA device they are spawned, because CUDA does not work in a fork; then
    the program's main module must be importable.

    Raises:
        UserError: a process was killed; or what a call raises.
    """
    if processes == 1:
        yield lambda method, inputs: map(getattr(search, method), inputs)
        return
    context = get_context("spawn" if torch.cuda.is_available() else "fork")
    pool = ProcessPoolExecutor(processes, context, _begin, (replace(search), os.getpid()))
    pool.submit(int)  # the processes start now, before there are threads, of which a fork would have the locks
    try:
        yield lambda method, inputs: pool.map(partial(_call, method), inputs)
    except BrokenProcessPool as error:
        remedy = "if memory of the host ran out, search in one process: OMP_NUM_THREADS=1"
        raise UserError(f"a process of the search was killed; {remedy}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(search: Search, parent: int) -> None:
    """Set up a new process, to end without a word on Ctrl-C, which reaches all processes, and with its parent."""
    global _search
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: Linux sends this signal when the parent ends
    if os.getppid() != parent:
        os._exit(1)
    quieten()
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    _search = search


def _call(method: str, argument: Any) -> Any:
    return getattr(_search, method)(argument)
