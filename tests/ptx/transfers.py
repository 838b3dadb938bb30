"""Instructions that move values to and from memory and between the threads of a warp; products of matrices."""

import numpy as np

from tests.ptx.machine import Machine
from tests.ptx.operands import (
    UNSIGNED,
    Mask,
    Operation,
    Read,
    address_of,
    bits_of,
    by_warp,
    decoded,
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
        if not ((count == 0) | (count == width)).all():
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
            if not ready.any():
                still.append((lanes, group, at, values))
                continue
            if not ready.all():
                still.append((lanes[~ready], group[~ready], at[~ready], values[~ready]))
                lanes, at, values = lanes[ready], at[ready], values[ready]
            machine.shared.write(at, machine.block[lanes], machine.warp[lanes], values)
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
    """The sum, the least or the largest over a warp, for each of its threads. Floats that are NaN do not count."""
    _, name, kind = instruction.modifiers
    reduction = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]
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
        warps, count = warps_of(machine, mask), len(write) or len(read)
        at = by_warp(machine, address(machine))[warps, : 8 * count].ravel()
        block, warp = (np.repeat(of[32 * warps], 8 * count) for of in (machine.block, machine.warp))
        if loads:
            matrices = machine.shared.read(at, block, warp, 8, word).reshape(-1, count, 8, 8)
            values = np.zeros((count, machine.threads // 32, 32), np.uint32)
            pairs = np.ascontiguousarray(matrices.mT if transposed else matrices).view(np.uint32)
            values[:, warps] = pairs.reshape(-1, count, 32).swapaxes(0, 1)
            for one, of_threads in zip(write, values, strict=True):
                one(machine, of_threads.ravel(), mask)
        else:
            pairs = np.stack([by_warp(machine, one(machine))[warps] for one in read], 1)
            matrices = pairs.view(word).reshape(-1, 8, 8)
            machine.shared.write(at, block, warp, (matrices.mT if transposed else matrices).reshape(-1, 8))

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
    a, b = ([reader(program, one, "b32") for one in members(text)] for text in instruction.operands[1:3])
    c = [reader(program, one, "f32") for one in members(instruction.operands[3])]

    def pairs(machine: Machine, read: list[Read]) -> np.ndarray:
        """Return two numbers of each register and thread: [register, warp, g, t, 2]."""
        bits = np.stack([np.broadcast_to(one(machine), machine.threads) for one in read])
        return decoded(f"{types[1]}x2", bits).reshape(len(read), -1, 8, 4, 2)

    def run(machine: Machine, mask: Mask) -> None:
        warps_of(machine, mask)
        left = pairs(machine, a).reshape(2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
        right = pairs(machine, b).transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        total = np.stack([np.broadcast_to(one(machine), machine.threads) for one in c])
        product = (left @ right).reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
        for one, values in zip(write, total + product.reshape(4, -1), strict=True):
            one(machine, values, mask)

    return run
