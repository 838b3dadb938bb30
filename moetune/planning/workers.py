"""Strategies of a plan searched in several processes, which share recorded closed forms on disk."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from moetune.errors import UserError
from moetune.report.console import quieten

if TYPE_CHECKING:  # a new process begins with `_begin`, before it imports what takes long
    from moetune.planning.search import Candidate, Search
    from moetune.planning.strategies import Strategy

_Input = TypeVar("_Input", "Strategy", "Candidate")


class Workers:
    """Calls methods of a search, in this process and in others beside it.

    Args:
        processes: their number, this one included. `multiprocessing` spawns the others, so the program's main module
            has to be importable.
    """

    def __init__(self, search: Search, processes: int = 1) -> None:
        self.search, self._start = search, search.start.model_dump_json(exclude_unset=True)
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = get_context("spawn")  # a fork of a process that has initialized CUDA cannot compute
            self._pool = ProcessPoolExecutor(processes - 1, context, _begin)
            self._pool.submit(_search, self._start)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def answers(
        self, method: Literal["largest", "traced"], inputs: Sequence[_Input], say: Callable[[_Input], None]
    ) -> Iterator[tuple[_Input, Candidate | UserError | None]]:
        """Yield each input with what the method of `Search` returns for it, in order.

        The other processes start when the first input is done, after which the caller may need no more, and with the
        last one.

        Args:
            say: called with each input that this process takes.
        """
        futures: dict[int, Future[Any]] = {}
        try:
            for number, one in enumerate(inputs):
                if number == 1 and self._pool is not None:
                    later = reversed(range(1, len(inputs)))
                    with suppress(BrokenProcessPool):  # killed: this process does their work
                        futures = {at: self._pool.submit(_answer, self._start, method, inputs[at]) for at in later}
                there = futures.get(number)
                if there is None or there.cancel() or isinstance(there.exception(), BrokenProcessPool):
                    say(one)
                    yield one, _answer(self._start, method, one, self.search)
                else:
                    yield one, there.result()
        finally:
            for future in futures.values():
                future.cancel()


def _begin() -> None:
    """Prepare a new process: Ctrl-C, which reaches all processes, ends it silently, and so does the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quieten()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _search(start: str) -> Search:
    from moetune.config.schema import RunConfig
    from moetune.planning.search import Search

    gc.freeze()  # what was imported stays
    return Search.of(RunConfig.model_validate_json(start))


def _answer(
    start: str, method: str, one: Strategy | Candidate, search: Search | None = None
) -> Candidate | UserError | None:
    try:
        return getattr(search or _search(start), method)(one)
    except UserError as error:  # not every model has every strategy
        return error
