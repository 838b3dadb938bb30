"""Observers of a step: of its memory, or of where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor


class StepObserver:
    """Called by a `Stepper`. This one does nothing."""

    def backward(self) -> AbstractContextManager[None]:
        """Enter for each backward pass."""
        return nullcontext()

    def eager_gradient(self, gradient: Tensor) -> None:
        """Called with each gradient that an expert bank computes outside of autograd, so that no hook sees it."""


@dataclass
class Where(StepObserver):
    """Where a run is: step from 1, micro-step from 0, and one of a trace's phases."""

    step: int = 1
    micro_step: int = 0
    phase: str = "load"

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.phase = "backward"
        yield
        self.phase = "forward"
