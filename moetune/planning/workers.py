"""`Workers`: call methods of a plan's `Search` in several processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from moetune.report.console import quieten

if TYPE_CHECKING:  # a spawned process must run `_begin` before slow imports
    from multiprocessing.connection import Connection

    from moetune.planning.search import Search

_search: Search | None = None
"""The search of a worker process."""


class Workers:
    """Processes that call methods of a `Search`; they end with the `with` statement that it is used in.

    They are forks of this process, which have imported all that it has, and its model. With a CUDA device they are
    spawned (`multiprocessing`), because CUDA does not work in a fork; then the program's main module must be
    importable.
    """

    def __init__(self, search: Search, processes: int = 1) -> None:
        self.search = search
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            import torch

            spawns = torch.cuda.is_available()
            context = get_context("spawn" if spawns else "fork")
            self._reader, self._writer = context.Pipe(duplex=False)
            if not spawns:
                _ = search.structure  # built once, before the forks
                gc.freeze()  # imported objects are never freed: the collector need not search them
            self._pool = ProcessPoolExecutor(
                processes, context, _begin, (replace(search) if spawns else search, self._reader, self._writer)
            )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._writer.close()  # ends the other processes, whatever they do
            self._pool.shutdown(cancel_futures=True)
            self._reader.close()

    def results(self, method: str, inputs: Sequence[Any]) -> Iterator[Any]:
        """Call a method of the search with each input; yield the results in the order of the inputs, as they come.

        What a call raises is raised. If processes are killed, this one does their work.
        """
        futures: list[Future[Any]] = []
        if self._pool is not None:
            with suppress(BrokenProcessPool, RuntimeError):
                futures = [self._pool.submit(_call, method, one) for one in inputs]
        for number, one in enumerate(inputs):
            try:
                if number < len(futures):
                    yield futures[number].result()
                    continue
            except BrokenProcessPool:
                futures = []
            yield getattr(self.search, method)(one)


def _begin(search: Search, parent: Connection, other_end: Connection) -> None:
    """Set up a new process to exit silently on Ctrl-C, which reaches all processes, and when its parent ends or closes
    its end of the pipe.

    Args:
        search: the search whose methods it calls.
        parent: the end of the pipe to read.
        other_end: the parent's end of it; this process's copy is closed.
    """
    global _search
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    other_end.close()
    quieten()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    _search = search


def _end_with(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def _call(method: str, one: Any) -> Any:
    return getattr(_search, method)(one)
