"""Instructions that compute a value for each thread, of its own registers.

Those that Triton makes of the project's kernels, and no others; NVIDIA's "Parallel Thread Execution ISA" describes all.
Approximate instructions (ex2.approx, div.full, …) are as exact as numpy's, and none flushes denormals.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from tests.ptx.machine import Machine
from tests.ptx.operands import UNSIGNED, Mask, Operation, bits_of, makes, members, reader, writer
from tests.ptx.program import Instruction, Program


def _divided(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Divide, integers towards zero."""
    if one.dtype.kind == "f":
        return one / other
    other = np.where(other == 0, other.dtype.type(1), other)
    return (one - np.fmod(one, other)) // other


def _fused(one: np.ndarray, other: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Multiply and add, rounded once; in float64, which for float32 differs in one of 2^29 cases."""
    return one.astype(np.float64) * other.astype(np.float64) + more.astype(np.float64)


def _high(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    wide = f"{one.dtype.kind}{2 * one.itemsize}"
    return one.astype(wide) * other.astype(wide) >> np.array(8 * one.itemsize, wide)


def _product(one: np.ndarray, other: np.ndarray, more: Any = 0) -> np.ndarray:
    """Multiply integers, and return the whole product."""
    wide = f"{one.dtype.kind}{min(8, 2 * one.itemsize)}"
    return one.astype(wide) * other.astype(wide) + np.asarray(more).astype(wide)


def _shifted(left: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def shift(value: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = 8 * value.itemsize
        by = by.astype(np.int64)
        least = np.minimum(by, bits - 1).astype(value.dtype)
        shifted = value << least if left else value >> least
        if not left and value.dtype.kind == "i":
            return shifted
        return np.where(by < bits, shifted, 0)

    return shift


def _funnel(right: bool) -> Callable[..., np.ndarray]:
    """The low or the high half of two words that are shifted as one, by at most 31 bits (shf.wrap)."""

    def shift(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        both = high.astype(np.uint64) << np.uint64(32) | low
        by = by.astype(np.uint64) & np.uint64(31)
        return both >> by if right else both << by >> np.uint64(32)

    return shift


def _extracted(value: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The bits of a field, extended by its sign if it has one (bfe)."""
    first, count = np.minimum(first, 63), np.minimum(count, 32)
    field = (value.astype(np.int64) >> first.astype(np.int64)) & (1 << count.astype(np.int64)) - 1
    is_negative = (value.dtype.kind == "i") & (field >> np.maximum(count.astype(np.int64) - 1, 0) == 1)
    return np.where(is_negative, field - (1 << count.astype(np.int64)), field)


def _inserted(field: np.ndarray, value: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << count.astype(np.uint64)) - np.uint64(1) << first.astype(np.uint64)
    return field.astype(np.uint64) << first.astype(np.uint64) & mask | value & ~mask


def _permuted(one: np.ndarray, other: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four bytes that are chosen of eight; a selector's bit 3 repeats the byte's sign (prmt)."""
    both, found = other.astype(np.uint64) << np.uint64(32) | one, np.uint64(0)
    for place in range(4):
        choice = selector.astype(np.uint64) >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        byte = np.where(choice >= 8, (byte >> np.uint64(7)) * np.uint64(255), byte)
        found = found | byte << np.uint64(8 * place)
    return found


def _by_table(one: np.ndarray, two: np.ndarray, three: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Any function of three bits, by the table of its eight results (lop3)."""
    found = np.uint32(0)
    for number in range(8):
        if int(table) >> number & 1:
            found = found | (
                (one if number & 4 else ~one) & (two if number & 2 else ~two) & (three if number & 1 else ~three)
            )
    return found


# name -> function of the decoded operands; types of operands that are not the instruction's follow
_BY_ELEMENT: dict[str, tuple[Callable[..., Any], dict[int, str]]] = {
    "add": (np.add, {}), "sub": (np.subtract, {}), "div": (_divided, {}), "rem": (np.fmod, {}),
    "min": (lambda *of: reduce(np.fmin, of), {}), "max": (lambda *of: reduce(np.fmax, of), {}),  # of two or three
    "neg": (np.negative, {}), "abs": (np.abs, {}),
    "and": (np.bitwise_and, {}), "or": (np.bitwise_or, {}), "xor": (np.bitwise_xor, {}), "not": (np.invert, {}),
    "popc": (lambda x: sum(x >> np.uint32(bit) & np.uint32(1) for bit in range(32)), {}),
    "fma": (_fused, {}), "ex2": (np.exp2, {}), "lg2": (np.log2, {}), "rcp": (np.reciprocal, {}), "sqrt": (np.sqrt, {}),
    "rsqrt": (lambda value: 1 / np.sqrt(value), {}), "mov": (np.asarray, {}), "cvta": (np.asarray, {}),
    "selp": (lambda one, other, chosen: np.where(chosen, one, other), {2: "pred"}),
    "shl": (_shifted(left=True), {1: "u32"}), "shr": (_shifted(left=False), {1: "u32"}),
    "bfe": (_extracted, {1: "u32", 2: "u32"}), "bfi": (_inserted, {}), "prmt": (_permuted, {}), "lop3": (_by_table, {}),
}  # fmt: skip
_KNOWN = {"rn", "full", "approx", "ftz", "lo", "to", "global", "b32", "l", "r", "wrap", "u64"}


@makes(*_BY_ELEMENT)
def _by_element(program: Program, instruction: Instruction) -> Operation:
    function, others = _BY_ELEMENT[instruction.name]
    if instruction.name == "mov" and "{" in instruction.text:
        return _repacked(program, instruction)
    result, modifiers = instruction.type, instruction.modifiers[:-1]
    if modifiers[-1:] == ("f32",):  # add, sub and fma of 16-bit operands; the last one is of the result's type
        result, modifiers, others = "f32", modifiers[:-1], {len(instruction.operands) - 2: "f32"}
    if not _KNOWN.issuperset(modifiers):
        raise NotImplementedError
    return _apply(program, instruction, function, result, others)


def _apply(
    program: Program, instruction: Instruction, function: Callable[..., Any], result: str, others: dict[int, str]
) -> Operation:
    to, *of = instruction.operands
    read = [reader(program, text, others.get(place, instruction.type)) for place, text in enumerate(of)]
    write = writer(program, to, result)
    return lambda machine, mask: write(machine, function(*(one(machine) for one in read)), mask)


@makes("mul", "mad")
def _multiplied(program: Program, instruction: Instruction) -> Operation:
    type_ = instruction.type
    if type_[0] in "fb":
        return _apply(program, instruction, np.multiply, type_, {})
    half = instruction.modifiers[0]
    result = f"{type_[0]}{2 * bits_of(type_)}" if half == "wide" else type_
    return _apply(program, instruction, {"hi": _high}.get(half, _product), result, {2: result})


@makes("shf")
def _shf(program: Program, instruction: Instruction) -> Operation:
    direction, mode, _ = instruction.modifiers
    if mode != "wrap":
        raise NotImplementedError
    return _apply(program, instruction, _funnel(right=direction == "r"), "b32", {})


def _repacked(program: Program, instruction: Instruction) -> Operation:
    """A register of several, or several of one."""
    to, of = (members(text) for text in instruction.operands)
    bits = bits_of(instruction.type)
    whole, part = f"b{bits}", f"b{bits // max(len(to), len(of))}"
    read = [reader(program, text, part if len(of) > 1 else whole) for text in of]
    write = [writer(program, text, part if len(to) > 1 else whole) for text in to]
    places = [UNSIGNED[bits].type(place * bits_of(part)) for place in range(max(len(to), len(of)))]

    def run(machine: Machine, mask: Mask) -> None:
        values = [one(machine).astype(UNSIGNED[bits]) for one in read]
        together = sum((value << place for value, place in zip(values, places, strict=False)), UNSIGNED[bits].type(0))
        for one, place in zip(write, places, strict=False):
            one(machine, together >> place, mask)

    return run


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@makes("setp")
def _setp(program: Program, instruction: Instruction) -> Operation:
    how, *combined, type_ = instruction.modifiers
    unordered = how[:2] in COMPARISONS and how[2:] == "u"  # true if one is NaN
    if how in ("num", "nan"):
        compare = lambda one, other: (np.isnan(one) | np.isnan(other)) ^ (how == "num")  # noqa: E731
    elif unordered:
        compare = lambda one, other: COMPARISONS[how[:2]](one, other) | np.isnan(one) | np.isnan(other)  # noqa: E731
    elif how == "ne" and type_[0] == "f":
        compare = lambda one, other: (one < other) | (one > other)  # noqa: E731
    else:
        compare = COMPARISONS[how]
    if not combined:
        return _apply(program, instruction, compare, "pred", {})
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combined[0]]
    return _apply(
        program, instruction, lambda one, other, more: combine(compare(one, other), more), "pred", {2: "pred"}
    )


@makes("cvt")
def _cvt(program: Program, instruction: Instruction) -> Operation:
    *modes, to, of = instruction.modifiers
    read = [reader(program, text, of) for text in instruction.operands[1:]]
    write = writer(program, instruction.operands[0], to)
    if not {"rn", "rzi", "rz"}.issuperset(modes):
        raise NotImplementedError
    to_integer = to[0] in "su" and of in ("f16", "bf16", "f32", "f64")
    limits = np.iinfo(f"{'i' if to[0] == 's' else 'u'}{bits_of(to) // 8}") if to_integer else None

    def run(machine: Machine, mask: Mask) -> None:
        values = [one(machine) for one in read]
        if len(values) == 2:  # the second operand is the low half
            values = [np.stack(np.broadcast_arrays(*values[::-1]), -1)]
        if limits is not None:
            values = [np.clip(np.nan_to_num(np.trunc(values[0].astype(np.float64))), limits.min, limits.max)]
        write(machine, values[0], mask)

    return run
