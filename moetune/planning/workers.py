"""Ways of a plan, looked at in several processes at once. What one of them records, all find on disk."""

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

if TYPE_CHECKING:
    from moetune.planning.search import Search, Solution
    from moetune.planning.strategies import Strategy

_Asked = TypeVar("_Asked", "Strategy", "Solution")


class Workers:
    """Asks a search one thing after another, in this process and in others beside it.

    Args:
        processes: how many in all. Others are started as `multiprocessing` starts them: the program's main module has
            to be importable.
    """

    def __init__(self, search: Search, processes: int = 1) -> None:
        self.search, self._start = search, search.start.model_dump_json(exclude_unset=True)
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = get_context("spawn")  # a copy of a process that has looked at a GPU cannot compute
            self._pool = ProcessPoolExecutor(processes - 1, context, _begin)
            self._pool.submit(_search, self._start)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def answers(
        self, question: Literal["largest", "traced"], asked: Sequence[_Asked], say: Callable[[_Asked], None]
    ) -> Iterator[tuple[_Asked, Solution | UserError | None]]:
        """Each, and what `Search` answers to it, in order.

        The others begin when the first is answered: it may be enough.

        Args:
            say: is told what is looked at here.
        """
        futures: dict[int, Future[Any]] = {}
        try:
            for number, one in enumerate(asked):
                if number == 1 and self._pool is not None:  # from the other end
                    later = reversed(range(1, len(asked)))
                    with suppress(BrokenProcessPool):  # the others were ended: what they had is looked at here
                        futures = {at: self._pool.submit(_answer, self._start, question, asked[at]) for at in later}
                there = futures.get(number)
                if there is None or there.cancel() or isinstance(there.exception(), BrokenProcessPool):
                    say(one)
                    answer = _answered(self.search, question, one)
                else:
                    answer = there.result()
                yield one, answer
        finally:
            for future in futures.values():
                future.cancel()


def _answered(search: Search, question: str, asked: Strategy | Solution) -> Solution | UserError | None:
    try:
        return getattr(search, question)(asked)
    except UserError as error:  # not every model has every way
        return error


def _begin() -> None:
    """Of a process beside: before it imports what searches."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all of them, and ends these without a word
    quieten()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """However the parent ends: its end of a pipe closes then."""
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


def _answer(start: str, question: str, asked: Strategy | Solution) -> Solution | UserError | None:
    return _answered(_search(start), question, asked)
