"""Who watches a step: whatever counts its memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class StepObserver:
    """Is told what a `Stepper` does. By itself it does nothing."""

    def backward(self) -> AbstractContextManager[None]:
        """Entered for each backward pass."""
        return nullcontext()

    def eager_gradient(self, gradient: Tensor) -> None:
        """Is given each gradient that an expert bank gives away by itself, which no hook on a parameter sees."""
