"""Threads of many blocks that execute a program together, numpy over the threads."""

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from tests.ptx.memory import Fault, GlobalMemory, SharedMemory
from tests.ptx.program import Instruction, Program

JUMPS = {"bra", "ret", "exit", "bar"}  # what ends a straight run of instructions


class Machine:
    """The state of the threads of some blocks.

    Threads diverge as on a GPU: those with the lowest place in the program run, and others wait until these have come
    to their place.

    Attributes:
        registers: of each name a value for all threads, or one for each; bits, as unsigned integers.
        copies: cp.async that no thread has waited for, as (threads, their group, addresses, values).
        groups: number of groups of copies that each thread has committed.
    """

    def __init__(
        self, program: Program, memory: GlobalMemory, parameters: dict[str, int], grid: Sequence[int],
        blocks: np.ndarray, shared_bytes: int,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.parameters = program, memory, parameters
        self.threads = len(blocks) * program.threads
        thread = np.tile(np.arange(program.threads, dtype=np.uint32), len(blocks))
        self.block, self.warp = np.repeat(np.arange(len(blocks)), program.threads), thread // 32
        self.shared = SharedMemory(len(blocks), shared_bytes)
        z, y, x = np.unravel_index(blocks, tuple(grid)[::-1])
        self.registers: dict[str, np.ndarray] = {"%tid.x": thread, "%laneid": thread % 32}
        self.registers |= {
            f"%ctaid.{axis}": np.repeat(place.astype(np.uint32), program.threads)
            for axis, place in (("x", x), ("y", y), ("z", z))
        }
        self.registers |= {f"%nctaid.{axis}": np.uint32(size) for axis, size in zip("xyz", grid, strict=True)}
        self.copies: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.groups = np.zeros(self.threads, np.int64)
        self._at = np.zeros(self.threads, np.int64)
        self._done, self._waiting = (np.zeros(self.threads, bool) for _ in range(2))

    def run(self, operations: "Sequence[Callable[[Machine, np.ndarray | None], None]]") -> None:
        """Execute the program to its end.

        Args:
            operations: its instructions, as functions of a machine and of the threads that execute them.
        """
        program = self.program
        stops = {*program.labels.values(), len(program.instructions)}
        while not self._done.all():
            ready = ~(self._done | self._waiting)
            if not ready.any():
                self._release()
                continue
            first = int(self._at[ready].min())
            active = ready & (self._at == first)
            mask = None if active.all() else active
            for at in count(first):
                if at == len(program.instructions):
                    self._done[active] = True
                    break
                if at != first and at in stops:
                    self._at[active] = at
                    break
                instruction = program.instructions[at]
                if instruction.name in JUMPS and instruction.modifiers[:1] != ("warp",):
                    self._jump(at, active)
                    break
                operations[at](self, mask)
        self.shared.pass_barrier(np.ones(self.threads // program.threads, bool))

    def guarded(self, instruction: Instruction, mask: np.ndarray) -> np.ndarray:
        """Return which of the threads in `mask` the guard of an instruction leaves."""
        if not instruction.guard:
            return mask
        return (self.registers[instruction.guard] ^ instruction.negated) & mask

    def _jump(self, at: int, active: np.ndarray) -> None:
        instruction = self.program.instructions[at]
        taken = self.guarded(instruction, active)
        self._at[active] = at + 1
        if instruction.name == "bra":
            self._at[taken] = self.program.labels[instruction.operands[0]]
        elif instruction.name == "bar":
            self._waiting |= taken
            self._release()
        else:
            self._done |= taken

    def _release(self) -> None:
        """Let the threads of each block go on that all wait at a barrier, or have ended."""
        waiting, done, at = (of.reshape(-1, self.program.threads) for of in (self._waiting, self._done, self._at))
        ready = (waiting | done).all(1) & waiting.any(1)
        if not ready.any() and (self._waiting | self._done).all():
            raise Fault("threads wait at a barrier for ever")
        places = np.where(waiting, at, -1).max(1, keepdims=True)
        if (ready & (waiting & (at != places)).any(1)).any():
            raise Fault("threads of a block wait at different barriers")
        waiting[ready] = False
        self.shared.pass_barrier(ready)
