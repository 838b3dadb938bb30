"""`Workers`: run the search of a plan in several processes, which share recorded closed forms on disk."""

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

if TYPE_CHECKING:  # a new process must run `_begin` before slow imports
    from moetune.memory.assumed_routing import AssumedRouting
    from moetune.models.catalog.gpus import Gpu
    from moetune.planning.search import Candidate, Search
    from moetune.planning.strategies import Strategy

    _Options = tuple[Gpu | None, bool, AssumedRouting | None]
    _Start = tuple[str, Gpu | None, bool, AssumedRouting | None]

_Input = TypeVar("_Input", "Strategy", "Candidate")


class Workers:
    """Calls methods of a `Search` in this process and in other processes beside it.

    Args:
        processes: the number of processes, this one included. The others are spawned (`multiprocessing`), so the
            program's main module must be importable.
        options: further arguments of `Search.of`: GPU, `tight`, routing.
    """

    def __init__(self, search: Search, processes: int = 1, options: _Options = (None, False, None)) -> None:
        self.search, self._start = search, (search.start.model_dump_json(exclude_unset=True), *options)
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = get_context("spawn")  # CUDA does not work in a fork of a process that has initialized it
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
        """Call a method of `Search` with each input, and yield (input, result) pairs in the order of the inputs.

        A `UserError` that the method raises is yielded as its result. The other processes get work only once the first
        result is known, and begin with the last input: the caller often needs only the first results. `say` is called
        with each input that this process works on.
        """
        futures: dict[int, Future[Any]] = {}
        try:
            for number, one in enumerate(inputs):
                if number == 1 and self._pool is not None:
                    later = reversed(range(1, len(inputs)))
                    with suppress(BrokenProcessPool):  # the workers were killed: this process does their work
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
    """Set up a new process to exit silently on Ctrl-C, which reaches all processes, and when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quieten()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _search(start: _Start) -> Search:
    """Return the search of a run file, given as JSON with the other arguments of `Search.of`; built once in each
    process."""
    from moetune.config.schema import RunConfig
    from moetune.planning.search import Search

    gc.freeze()  # imported objects are never freed: the collector need not search them
    run, card, tight, routing = start
    return Search.of(RunConfig.model_validate_json(run), card, tight=tight, routing=routing)


def _answer(
    start: _Start, method: str, one: Strategy | Candidate, search: Search | None = None
) -> Candidate | UserError | None:
    """Call a method of `search` (None: of the search for the run file `start`) with `one`; return its result, or the
    `UserError` that it raises."""
    try:
        return getattr(search or _search(start), method)(one)
    except UserError as error:  # some strategies are impossible for some models
        return error
