"""Ctrl-C ends a run, whatever Python was doing: one that arrives in a destructor or a weak reference's callback is
dropped there, with a line on stderr, and training would go on."""

from __future__ import annotations

import signal
import threading
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Interruptible(TrainerCallback):
    """Notes SIGINT beside raising it, and raises it again at the end of the step."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            self._before = signal.signal(signal.SIGINT, self._interrupted)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Gives SIGINT back; to be called however training ends."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _interrupted(self, number: int, frame: Any) -> None:
        self.asked = True
        raise KeyboardInterrupt
