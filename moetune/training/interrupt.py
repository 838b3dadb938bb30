"""Ctrl-C and SIGTERM: save after the step; a second one ends at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moetune.parallel.ranks import Ranks

_SAME = 1.0
"""Seconds within which repeated signals count as a single one.

The terminal and the launcher of the ranks may both send the same Ctrl-C to every process.
"""


class Interrupted(KeyboardInterrupt):
    """Raised when SIGINT or SIGTERM (`number`) has ended a run, after a checkpoint of the last step was written."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def recorded_signals(ranks: Ranks) -> Iterator[Callable[[], int]]:
    """Record SIGINT and SIGTERM in the `with` block instead of letting them end the process.

    Yields a function, which every rank must call together: it returns the number of the first signal that any rank
    received, 0 for none; if ranks received both, SIGTERM. A second signal, more than `_SAME` seconds later, goes to the
    handler from before. Outside of the main thread, where Python allows no signal handlers, nothing is recorded.
    """
    first, since, before = 0, 0.0, dict[int, Any]()

    def note(number: int, frame: Any) -> None:
        nonlocal first, since
        if not first:
            first, since = number, time.monotonic()
        elif time.monotonic() - since > _SAME:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        before.update((number, signal.signal(number, note)) for number in (signal.SIGINT, signal.SIGTERM))
    try:
        yield lambda: max(ranks.gather(first))  # SIGTERM has the larger number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
