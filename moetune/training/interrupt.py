"""Ctrl-C and SIGTERM end a run after the current step, which is saved; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import TracebackType
from typing import Any

import torch

from moetune.parallel.ranks import Ranks

_SAME = 1.0
"""Seconds within which signals count as one: both the terminal and the ranks' launcher send it to every process."""


class Interrupted(KeyboardInterrupt):
    """A signal ended a run; its last step is in a checkpoint.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Records SIGINT and SIGTERM inside the `with`, on the main thread, the only one that may set handlers."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._number, self._at = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def received(self) -> int:
        """Return the signal that any rank has received, the same on all ranks; 0 without one."""
        if self._ranks.is_single:
            return self._number
        found = torch.zeros(2, device=self._device)
        if self._number:
            found[int(self._number == signal.SIGTERM)] = 1
        by_keyboard, by_term = self._ranks.total(found).tolist()
        return signal.SIGTERM if by_term else signal.SIGINT if by_keyboard else 0

    def _note(self, number: int, frame: Any) -> None:
        if not self._number:
            self._number, self._at = number, time.monotonic()
        elif time.monotonic() - self._at > _SAME:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
