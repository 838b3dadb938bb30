"""Who watches a step: whatever counts its memory, or says where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor


class StepObserver:
    """Is told what a `Stepper` does. By itself it does nothing."""

    def backward(self) -> AbstractContextManager[None]:
        """Entered for each backward pass."""
        return nullcontext()

    def eager_gradient(self, gradient: Tensor) -> None:
        """Is given each gradient that an expert bank gives away by itself, which no hook on a parameter sees."""


@dataclass
class Where(StepObserver):
    """Where a run is. Steps and micro-steps are counted from 1 and 0, as in metrics and in a trace; phases are a
    trace's."""

    step: int = 1
    micro_step: int = 0
    phase: str = "load"

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.phase = "backward"
        yield
        self.phase = "forward"
