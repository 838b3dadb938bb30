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
from functools import cache, partial
from multiprocessing import get_context
from threading import Condition
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from moetune.errors import UserError
from moetune.report.console import quieten

if TYPE_CHECKING:  # a spawned process must run `_begin` before slow imports
    from multiprocessing.connection import Connection

    from moetune.config.schema import RunConfig
    from moetune.memory.assumed_routing import AssumedRouting
    from moetune.models.catalog.gpus import Gpu
    from moetune.planning.candidate import Candidate
    from moetune.planning.search import Search
    from moetune.planning.strategies import Strategy
    from moetune.training.trl import InTrl

    _Options = tuple[Gpu | None, bool, AssumedRouting | None, InTrl | None]
    _Start = tuple[str, Gpu | None, bool, AssumedRouting | None, InTrl | None]

_Input = TypeVar("_Input", "Strategy", "Candidate", "tuple[RunConfig, bool]")
_Output: TypeAlias = "Candidate | UserError | None"


class Workers:
    """Calls methods of a `Search` in this process and in other processes, which end with the `with` statement that it
    is used in.

    Args:
        search: the search in this process; the others build theirs from its `start` and `options`.
        processes: the number of processes, this one included. The others are forks of this one, which have imported
            all that it has. With a CUDA device they are spawned (`multiprocessing`), because CUDA does not work in a
            fork; then the program's main module must be importable.
        options: further arguments of `Search.of`: GPU, `tight`, routing, trainer.
    """

    def __init__(self, search: Search, processes: int = 1, options: _Options = (None, False, None, None)) -> None:
        self.search, self._start = search, (search.start.model_dump_json(exclude_unset=True), *options)
        self._pool: ProcessPoolExecutor | None = None
        self._others = processes - 1
        if self._others:
            import torch

            context = get_context("spawn" if torch.cuda.is_available() else "fork")
            self._reader, self._writer = context.Pipe(duplex=False)
            gc.freeze()  # imported objects are never freed: the collector need not search them
            self._pool = ProcessPoolExecutor(self._others, context, _begin, (self._reader, self._writer))
            self._pool.submit(_search, self._start)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._writer.close()  # ends the other processes, whatever they do
            self._pool.shutdown(cancel_futures=True)
            self._reader.close()

    def answers(
        self,
        method: Literal["found", "predict", "traced"],
        inputs: Sequence[_Input],
        say: Callable[[_Input], None] = lambda one: None,
        more: Callable[[_Input, list[_Output]], tuple[Any, ...] | None] = lambda one, before: (),
        delay: Callable[[_Input, list[_Input]], int | None] = lambda one, running: 0,
        known: Callable[..., tuple[_Output] | None] = lambda *_: None,
    ) -> Iterator[tuple[_Input, _Output]]:
        """Call a method of `Search` with each input, and yield (input, result) pairs in the order of the inputs.

        A `UserError` that the method raises is yielded as its result. Calls begin in the order of the inputs, each as
        soon as a process is free, but see `delay`.

        Args:
            method: the name of the method.
            inputs: the first argument of each call.
            say: called with each input on which this process begins to work.
            more: returns further arguments of a call, from its input and the results for earlier inputs known when it
                begins; None if the call is needless, whose result is then None.
            delay: given an input and those of the running calls, returns a number; the call with the lowest begins
                next. None: not while these run.
            known: given a call's arguments, returns its result as a tuple of one if that takes no time, else None.

        Raises:
            BaseException: what a call raised, if that is no `UserError`.
        """
        left, lock, running, futures = list(range(len(inputs))), Condition(), list[int](), set[int]()
        results: dict[int, _Output] = {}
        failures = list[BaseException]()  # of the other processes

        def following() -> tuple[int, tuple[_Start, str, _Input, tuple[Any, ...]]] | None:
            """Take the next call: return its number and its arguments; None if none may begin. Pass over needless
            calls."""
            while left:
                of_now = [inputs[number] for number in running]
                late = [(of, number) for number in left if (of := delay(inputs[number], of_now)) is not None]
                if not late:
                    return None
                number = min(late)[1]
                left.remove(number)
                before: list[_Output] = [result for at, result in sorted(results.items()) if at < number]
                further = more(inputs[number], before)
                there = (None,) if further is None else known(inputs[number], *further)
                if further is not None and there is None:
                    running.append(number)
                    return number, (self._start, method, inputs[number], further)
                results[number] = None if there is None else there[0]
            return None

        def feed() -> None:
            """Give work to the other processes that are free; the caller must hold `lock`."""
            while self._pool is not None and len(futures) < self._others and (call := following()) is not None:
                number, arguments = call
                try:
                    future = self._pool.submit(_answer, *arguments)
                except (BrokenProcessPool, RuntimeError):  # the others were killed: this process does their work
                    put_back(number)
                    return
                futures.add(number)
                future.add_done_callback(partial(done, number))

        def put_back(number: int) -> None:
            running.remove(number)
            left.insert(0, number)

        def done(number: int, future: Future[Any]) -> None:
            with lock:
                futures.remove(number)
                if future.cancelled() or isinstance(future.exception(), BrokenProcessPool):
                    put_back(number)
                elif (error := future.exception()) is not None:
                    failures.append(error)
                else:
                    running.remove(number)
                    results[number] = future.result()
                    feed()
                lock.notify()

        try:
            for number, one in enumerate(inputs):
                while number not in results:
                    with lock:
                        call = following()
                        feed()
                        if call is None and number not in results and not failures:
                            lock.wait()
                        if failures:
                            raise failures[0]
                    if call is not None:
                        mine, arguments = call
                        say(inputs[mine])
                        result = _answer(*arguments, search=self.search)
                        with lock:
                            running.remove(mine)
                            results[mine] = result
                yield one, results[number]
        finally:
            with lock:
                left.clear()


def _begin(parent: Connection, other_end: Connection) -> None:
    """Set up a new process to exit silently on Ctrl-C, which reaches all processes, and when its parent ends or closes
    its end of the pipe.

    Args:
        parent: the end of the pipe to read.
        other_end: the parent's end of it; this process's copy is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    other_end.close()
    quieten()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


@cache
def _search(start: _Start) -> Search:
    """Return the search for `start`, a configuration as JSON and the other arguments of `Search.of`; built once in each
    process."""
    import torch

    from moetune.config.schema import RunConfig
    from moetune.planning.search import Search

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    run, card, tight, routing, trainer = start
    return Search.of(RunConfig.model_validate_json(run), card, tight=tight, routing=routing, trainer=trainer)


def _answer(
    start: _Start,
    method: str,
    one: Strategy | Candidate | tuple[RunConfig, bool],
    more: tuple[Any, ...],
    search: Search | None = None,
) -> Candidate | UserError | None:
    """Call a method of `search` (None: of this process's search for `start`) with `one` and `more` arguments; return
    its result, or the `UserError` that it raises."""
    try:
        return getattr(search or _search(start), method)(one, *more)
    except UserError as error:  # some strategies are impossible for some models
        return error
