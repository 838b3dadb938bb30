"""Ctrl-C and SIGTERM: a run saves a checkpoint after the current step and ends; a second signal ends it at once."""

import os
import signal
import threading
import time
from types import TracebackType
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


class Signals:
    """Context manager that records SIGINT and SIGTERM instead of letting them end the process.

    `received` returns the first signal. A second one, more than `_SAME` seconds later, goes to the handler from before
    the `with`. Outside of the main thread, where Python allows no signal handlers, nothing is recorded.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._number, self._at = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def received(self) -> int:
        """Return the number of the signal that any rank received, 0 for none; if there were both, SIGTERM.

        Every rank must call this.
        """
        return max(self._ranks.gather(self._number))  # SIGTERM has the larger number

    def _note(self, number: int, frame: Any) -> None:
        """Record the first signal; pass a later one to the handler from before the `with`."""
        if not self._number:
            self._number, self._at = number, time.monotonic()
        elif time.monotonic() - self._at > _SAME:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
