"""Observers of a `Stepper`: backward passes, and gradients that no autograd hook sees."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor


class StepObserver:
    """Base class of observers, which does nothing; a `Stepper` calls its methods."""

    def backward(self, losses: Sequence[Tensor] = ()) -> AbstractContextManager[None]:
        """Return a context manager within which each backward pass runs: of one loss, or of the sum of `losses`, those
        of micro-batches that take turns."""
        return nullcontext()

    def turn(self, micro_batch: int) -> AbstractContextManager[None]:
        """Return a context manager within which a micro-batch computes, until it is the turn of another."""
        return nullcontext()

    def eager_gradient(self, gradient: Tensor) -> None:
        """Receive a gradient that an expert bank computed itself in its backward pass, which no autograd hook sees."""


@dataclass
class Where(StepObserver):
    """The current position of a run in its steps, to label what is recorded.

    Attributes:
        step: number of the optimizer step, from 1.
        micro_step: number of the micro-batch in the step, from 0.
        phase: what is running: `load`, `forward`, `backward`, `optimizer` or `evaluation`.
    """

    step: int = 1
    micro_step: int = 0
    phase: str = "load"

    @contextmanager
    def backward(self, losses: Sequence[Tensor] = ()) -> Iterator[None]:
        self.phase = "backward"
        yield
        self.phase = "forward"
