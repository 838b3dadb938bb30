"""Execution of a kernel's PTX for every block of a grid."""

import hashlib
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np
from torch import Tensor

from tests.ptx.instructions import operation
from tests.ptx.machine import Machine
from tests.ptx.memory import WIDEST, GlobalMemory
from tests.ptx.operands import Operation
from tests.ptx.program import Program

THREADS_AT_ONCE = 8192
SMALL = 1 << 26
"""Bytes of a launch's tensors up to which its results are kept."""
KEPT = 200
"""Launches whose results are kept."""
_results: dict[Hashable, list[bytes | None]] = {}


def launch(
    program: Program, tensors: Sequence[Tensor], parameters: Sequence[int], grid: Sequence[int], shared_bytes: int
) -> None:
    """Execute a kernel for every block of a grid.

    A launch of the same instructions on the same values, as of another capability, is not executed again: what it
    writes is known.

    Args:
        program: the kernel.
        tensors: what it may read and write.
        parameters: the bits of each of its parameters.
        grid: blocks along x, y and z.
        shared_bytes: shared memory of a block.

    Raises:
        Fault: if the kernel does what is undefined on a GPU.
        NotImplementedError: if it has an instruction that is not in instructions.py.
    """
    memory = GlobalMemory(tensors)
    spans = memory.spans
    if sum(span.size for span in spans.values()) > SMALL:
        _execute(program, memory, parameters, grid, shared_bytes)
        return
    # Spans by the order of the parameters, because addresses are others each time.
    places = [memory.place(one) for one in parameters]
    order = list(dict.fromkeys(place[0] for place in places if place is not None))
    before = [_digest(spans[start]) for start in order]
    pointers = (
        one if place is None else (order.index(place[0]), place[0] % WIDEST, place[1])
        for one, place in zip(parameters, places, strict=True)
    )
    key = program.digest, *before, *pointers, *grid, shared_bytes
    if key not in _results:
        _execute(program, memory, parameters, grid, shared_bytes)
        _results[key] = [
            spans[start].tobytes() if _digest(spans[start]) != since else None
            for start, since in zip(order, before, strict=True)
        ]
        if len(_results) > KEPT:
            del _results[next(iter(_results))]
        return
    for start, result in zip(order, _results[key], strict=True):
        if result is not None:
            spans[start][:] = np.frombuffer(result, np.uint8)


def _digest(values: np.ndarray) -> bytes:
    return hashlib.sha1(values, usedforsecurity=False).digest()


def _execute(
    program: Program, memory: GlobalMemory, parameters: Sequence[int], grid: Sequence[int], shared_bytes: int
) -> None:
    named = dict(zip(program.parameters, parameters, strict=True))
    blocks, at_once = np.arange(np.prod(grid)), max(1, THREADS_AT_ONCE // program.threads)
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), at_once):
            machine = Machine(program, memory, named, grid, blocks[first : first + at_once], shared_bytes)
            machine.run(_operations(program))


@lru_cache(64)
def _operations(program: Program) -> list[Operation]:
    return [operation(program, one) for one in program.instructions]
