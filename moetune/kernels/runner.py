"""`runner`: functions and loops that allocate alike for like shapes, which a trace need not run each time."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

from torch import Tensor

Outputs: TypeAlias = Sequence[Tensor | None]
Run: TypeAlias = Callable[[Hashable, Callable[[Sequence[Tensor]], Outputs], Sequence[Tensor]], Outputs]
"""(key, function, tensors) -> what the function returns for the tensors. The key is equal for calls that allocate the
same storages if their tensors have equal shapes, strides, dtypes and devices."""
Each: TypeAlias = Callable[[int, Tensor], Iterable[int]]
"""(count, a tensor that is read) -> the numbers of a loop whose body leaves nothing behind, and from number 1 on
allocates the same storages."""


@dataclass
class Runner:
    """How such functions and loops run."""

    run: Run
    each: Each


runner = Runner(run=lambda key, function, tensors: function(tensors), each=lambda count, tensor: range(count))
"""Runs each, unless `running_by` replaces `run` and `each`."""


def running_by(run: Run, each: Each) -> AbstractContextManager[Any]:
    """Let `run` call the functions within the `with` block, and `each` say which numbers of a loop run."""
    return patch.multiple(runner, run=run, each=each)
