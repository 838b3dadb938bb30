"""The kernels of a GPU, in a trace that runs on fake CPU tensors: which attention, and what kernels take inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moetune.memory.kernels.attention import attention_of
from moetune.memory.kernels.workspace import Workspace
from moetune.models.catalog.gpus import Gpu

if TYPE_CHECKING:
    from moetune.memory.trace.tracker import Tracker


@contextmanager
def kernels_of(gpu: Gpu | None, tracker: Tracker) -> Iterator[None]:
    """Inside, operations take the memory that they take on `gpu`; None leaves everything as it is on the CPU."""
    if gpu is None:
        yield
        return
    tracker.workspace = Workspace(gpu.capability, tracker)
    try:
        with attention_of(gpu.capability):
            yield
    finally:
        tracker.workspace = None
