"""Instructions that move values to and from memory and between the threads of a warp; products of matrices."""

from __future__ import annotations

import numpy as np

from tests.ptx.machine import Machine
from tests.ptx.memory import Fault
from tests.ptx.operands import (
    UNSIGNED,
    Mask,
    Operation,
    address_of,
    bits_of,
    by_warp,
    lanes_of,
    makes,
    members,
    reader,
    warps_of,
    writer,
)  # fmt: skip
from tests.ptx.program import Instruction, Program

# --- Memory -------------------------------------------------------------------------------------------------------


@makes("ld", "st")
def _access(program: Program, instruction: Instruction) -> Operation:
    place, type_ = instruction.modifiers[0], instruction.type
    if place == "param":
        write, name = (
            writer(program, instruction.operands[0], f"u{bits_of(type_)}"),
            instruction.operands[1].strip("[]"),
        )
        return lambda machine, mask: write(machine, np.uint64(machine.parameters[name]), mask)
    if place not in ("global", "shared") or {"relaxed", "acquire", "release", "volatile"} & {*instruction.modifiers}:
        raise NotImplementedError
    word = UNSIGNED[bits_of(type_)]
    if instruction.name == "ld":
        registers, address = members(instruction.operands[0]), address_of(program, instruction.operands[1])
        write = [writer(program, one, type_.replace("f", "b")) for one in registers]

        def load(machine: Machine, mask: Mask) -> None:
            lanes = lanes_of(machine, mask)
            at = address(machine)[lanes]
            if place == "global":
                found = machine.memory.read(at, len(registers), word)
            else:
                found = machine.shared.read(at, machine.block[lanes], machine.warp[lanes], len(registers), word)
            if type_[0] == "s":
                found = found.view(f"i{word.itemsize}")
            for number, one in enumerate(write):
                values = np.zeros(machine.threads, found.dtype)
                values[lanes] = found[:, number]
                one(machine, values, mask)

        return load
    address, registers = address_of(program, instruction.operands[0]), members(instruction.operands[1])
    read = [reader(program, one, f"b{bits_of(type_)}") for one in registers]

    def store(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        at = address(machine)[lanes]
        values = np.stack([np.broadcast_to(one(machine), machine.threads)[lanes] for one in read], 1)
        if place == "global":
            machine.memory.write(at, values)
        else:
            machine.shared.write(at, machine.block[lanes], machine.warp[lanes], values)

    return store


@makes("cp")
def _copied(program: Program, instruction: Instruction) -> Operation:
    """cp.async: from its issue to its wait, the destination holds NaN."""
    if instruction.modifiers[:2] == ("async", "commit_group"):
        return _commit
    if instruction.modifiers[:2] == ("async", "wait_group"):
        return _wait(int(instruction.operands[0], 0))
    to, of, size, *given = instruction.operands
    target, source, width = address_of(program, to), address_of(program, of), int(size, 0)
    read = reader(program, given[0] if given else size, "u32")
    if instruction.modifiers[0] != "async" or "bulk" in instruction.modifiers:
        raise NotImplementedError

    def copy(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        count = np.broadcast_to(read(machine), machine.threads)[lanes]
        if not np.isin(count, (0, width)).all():
            raise NotImplementedError("a part of a copy")
        values = np.zeros((len(lanes), width // 4), np.uint32)
        values[count > 0] = machine.memory.read(source(machine)[lanes[count > 0]], width // 4, values.dtype)
        at = target(machine)[lanes]
        machine.shared.write(at, machine.block[lanes], machine.warp[lanes], np.full_like(values, 0xFFFFFFFF))
        machine.copies.append((lanes, machine.groups[lanes], at, values))

    return copy


def _commit(machine: Machine, mask: Mask) -> None:
    machine.groups[lanes_of(machine, mask)] += 1


def _wait(left: int) -> Operation:
    """Let the copies of all groups but the last `left` arrive."""

    def wait(machine: Machine, mask: Mask) -> None:
        still = []
        for lanes, group, at, values in machine.copies:
            ready = group < machine.groups[lanes] - left
            if mask is not None:
                ready &= mask[lanes]
            here = lanes[ready]
            if len(here):
                machine.shared.write(at[ready], machine.block[here], machine.warp[here], values[ready])
            if not ready.all():
                still.append((lanes[~ready], group[~ready], at[~ready], values[~ready]))
        machine.copies = still

    return wait


# --- Warps --------------------------------------------------------------------------------------------------------


@makes("shfl")
def _shfl(program: Program, instruction: Instruction) -> Operation:
    """Each thread reads a register of another thread in its warp, or its own where there is none."""
    mode = instruction.modifiers[1]
    target, _, is_there = instruction.operands[0].partition("|")
    write, note = writer(program, target, "b32"), writer(program, is_there or "_", "pred")
    value, by, limits = (reader(program, text, "u32") for text in instruction.operands[1:4])
    lane = np.arange(32)

    def run(machine: Machine, mask: Mask) -> None:
        warps_of(machine, mask)
        values, step = by_warp(machine, value(machine)), by_warp(machine, by(machine)).astype(np.int64) & 31
        segment, clamp = int(limits(machine)) >> 8 & 31, int(limits(machine)) & 31
        first = lane & segment
        last = first | (clamp & ~segment)
        source = {
            "idx": first | (step & ~segment), "bfly": lane ^ step, "up": lane - step, "down": lane + step,
        }[mode]  # fmt: skip
        inside = source >= last if mode == "up" else source <= last
        write(machine, np.take_along_axis(values, np.where(inside, source, lane), 1).ravel(), mask)
        note(machine, np.broadcast_to(inside, values.shape).ravel(), mask)

    return run


@makes("redux")
def _redux(program: Program, instruction: Instruction) -> Operation:
    """The sum, the least or the largest over a warp, for each of its threads."""
    _, name, kind = instruction.modifiers
    reduction = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
    read, write = reader(program, instruction.operands[1], kind), writer(program, instruction.operands[0], kind)

    def run(machine: Machine, mask: Mask) -> None:
        warps_of(machine, mask)
        rows = by_warp(machine, read(machine))
        write(machine, np.repeat(reduction.reduce(rows, 1, dtype=rows.dtype), 32), mask)

    return run


@makes("ldmatrix", "stmatrix")
def _matrices(program: Program, instruction: Instruction) -> Operation:
    """8×8 matrices of 16-bit numbers: thread 8m + i has the address of row i of matrix m, and in register m a thread
    has two numbers of matrix m: row lane // 4, columns 2·(lane % 4) and the next."""
    loads, transposed = instruction.name == "ldmatrix", "trans" in instruction.modifiers
    registers, address = instruction.operands if loads else instruction.operands[::-1]
    address, word = address_of(program, address), UNSIGNED[16]
    write, read = (
        [make(program, one, "b32") for one in members(registers)] if uses else []
        for make, uses in ((writer, loads), (reader, not loads))
    )

    def run(machine: Machine, mask: Mask) -> None:
        warps = warps_of(machine, mask)
        rows = by_warp(machine, address(machine))[warps]
        block, warp = (np.repeat(of[32 * warps], 8) for of in (machine.block, machine.warp))
        for number in range(max(len(write), len(read))):
            at = rows[:, 8 * number : 8 * number + 8].ravel()
            if (at % 16).any():
                raise Fault("a row is not aligned to 16 bytes")
            if loads:
                matrix = machine.shared.read(at, block, warp, 8, word).reshape(-1, 8, 8)
                pairs = np.ascontiguousarray(matrix.mT if transposed else matrix).view(np.uint32).reshape(-1, 32)
                values = np.zeros((machine.threads // 32, 32), np.uint32)
                values[warps] = pairs
                write[number](machine, values.ravel(), mask)
            else:
                pairs = (
                    np.ascontiguousarray(by_warp(machine, read[number](machine))[warps]).view(word).reshape(-1, 8, 8)
                )
                machine.shared.write(at, block, warp, (pairs.mT if transposed else pairs).reshape(-1, 8))

    return run


@makes("mma")
def _mma(program: Program, instruction: Instruction) -> Operation:
    """d [16, 8] = a [16, 16] · b [16, 8] + c, of 16-bit floats, summed in float32.

    With g = lane // 4 and t = lane % 4 a thread has of a, in register j, row g + 8·(j % 2) and columns 2t + 8·(j // 2)
    and the next; of b, in register j, rows 2t + 8j and the next of column g; of c and d, in register j, row
    g + 8·(j // 2) and column 2t + j % 2.
    """
    sync, aligned, shape, row, column, *types = instruction.modifiers
    if (sync, aligned, shape, row, column) != ("sync", "aligned", "m16n8k16", "row", "col") or types[0] != "f32":
        raise NotImplementedError
    write = [writer(program, one, "f32") for one in members(instruction.operands[0])]
    a, b = ([reader(program, one, f"{types[1]}x2") for one in members(text)] for text in instruction.operands[1:3])
    c = [reader(program, one, "f32") for one in members(instruction.operands[3])]
    g, t = np.divmod(np.arange(32), 4)

    def run(machine: Machine, mask: Mask) -> None:
        warps_of(machine, mask)
        warps = machine.threads // 32
        left, right, total = (np.empty((warps, *size), np.float32) for size in ((16, 16), (16, 8), (16, 8)))
        for j, read in enumerate(a):
            pairs = np.broadcast_to(read(machine), (machine.threads, 2)).reshape(-1, 32, 2)
            left[:, g + 8 * (j % 2), 2 * t + 8 * (j // 2)] = pairs[..., 0]
            left[:, g + 8 * (j % 2), 2 * t + 8 * (j // 2) + 1] = pairs[..., 1]
        for j, read in enumerate(b):
            pairs = np.broadcast_to(read(machine), (machine.threads, 2)).reshape(-1, 32, 2)
            right[:, 2 * t + 8 * j, g], right[:, 2 * t + 8 * j + 1, g] = pairs[..., 0], pairs[..., 1]
        for j, read in enumerate(c):
            total[:, g + 8 * (j // 2), 2 * t + j % 2] = by_warp(machine, read(machine))
        total += left @ right
        for j, one in enumerate(write):
            one(machine, total[:, g + 8 * (j // 2), 2 * t + j % 2].ravel(), mask)

    return run
