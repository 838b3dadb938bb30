"""Who watches a run. Whoever knows what a run takes, or shows it to people, is given to it: nothing here knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from moetune.errors import DoesNotFit
from moetune.run.resolve import ResolvedRun
from moetune.training.pace import Pace

if TYPE_CHECKING:
    from moetune.training.loop import Loop


class Watcher:
    """Is told how a run goes. By itself it does nothing.

    Attributes:
        pace: what a step computes, as far as that is known.
    """

    pace = Pace()

    def reading(self, folder: str | None) -> AbstractContextManager[Callable[[float], None] | None]:
        """Entered while weights are read from a folder; gives what to tell the share read so far."""
        return nullcontext()

    def begin(self, loop: Loop) -> None:
        """Called before the first step."""

    def step_begins(self) -> None:
        """Called before the micro-steps of each step; again where a step begins anew with smaller micro-batches."""

    def step_ends(self) -> None:
        """Called after each update."""

    def logged(self, line: Mapping[str, Any]) -> None:
        """Is given each line of metrics, of steps or of an evaluation."""

    def out_of_memory(self, run: ResolvedRun, loop: Loop | None) -> DoesNotFit | None:
        """Examines why memory ran out: of the loop, or before there was one. None if that is not known."""
        return None

    def end(self) -> None:
        """Called once, however training ends."""
