"""Execution of a kernel's PTX for every block of a grid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tests.ptx.instructions import operation
from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory
from tests.ptx.program import Program

THREADS_AT_ONCE = 8192


def launch(
    program: Program, tensors: Sequence[Tensor], parameters: Sequence[int], grid: Sequence[int], shared_bytes: int
) -> None:
    """Execute a kernel for every block of a grid.

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
    memory, operations = GlobalMemory(tensors), [operation(program, one) for one in program.instructions]
    named = dict(zip(program.parameters, parameters, strict=True))
    blocks, at_once = np.arange(np.prod(grid)), max(1, THREADS_AT_ONCE // program.threads)
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), at_once):
            Machine(program, memory, named, grid, blocks[first : first + at_once], shared_bytes).run(operations)
