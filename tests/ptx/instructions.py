"""What each instruction does."""

import numpy as np

from tests.ptx import arithmetic, transfers  # noqa: F401  these note their instructions
from tests.ptx.machine import JUMPS, Machine
from tests.ptx.memory import Fault
from tests.ptx.operands import MAKERS, Mask, Operation
from tests.ptx.program import Instruction, Program


def operation(program: Program, instruction: Instruction) -> Operation:
    """Return a function that executes an instruction for the threads of a machine."""
    if instruction.name in JUMPS:
        return lambda machine, mask: None
    maker = MAKERS.get(instruction.name)
    try:
        if maker is None:
            raise NotImplementedError
        execute = maker(program, instruction)
    except (NotImplementedError, KeyError, ValueError, IndexError, StopIteration) as error:
        raise NotImplementedError(instruction.text) from error

    def run(machine: Machine, mask: Mask) -> None:
        if instruction.guard:
            everywhere = np.ones(machine.threads, bool) if mask is None else mask
            mask = machine.guarded(instruction, everywhere)
            if not mask.any():
                return
            mask = None if mask.all() else mask
        try:
            execute(machine, mask)
        except Fault as fault:
            raise Fault(f"{instruction.text}: {fault}") from None

    return run
