"""Operands of instructions: their types, and how the registers of threads are read and written."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.ptx.machine import Machine
from tests.ptx.memory import Fault
from tests.ptx.program import Instruction, Program

Mask = np.ndarray | None
"""Which threads execute an instruction; None for all."""
Operation = Callable[[Machine, Mask], None]
Maker = Callable[[Program, Instruction], Operation]
Read = Callable[[Machine], np.ndarray]
Write = Callable[[Machine, Any, Mask], None]
MAKERS: dict[str, Maker] = {}
"""Name of an instruction -> the function that makes its operation, noted by `makes`."""

UNSIGNED = {1: np.dtype(np.bool_)} | {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}


def makes(*names: str) -> Callable[[Maker], Maker]:
    """Return a decorator that notes a function as the maker of these instructions."""

    def note(maker: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(names, maker))
        return maker

    return note


# --- Types --------------------------------------------------------------------------------------------------------


@cache
def bits_of(type_: str) -> int:
    """Return the width of a type: 32 for "f32" and "bf16x2"."""
    if type_ == "pred":
        return 1
    of_one, _, count = re.sub(r"^\D+", "", type_).partition("x")
    return int(of_one) * int(count or 1)


def decoded(type_: str, bits: np.ndarray) -> np.ndarray:
    """Return the values that bits have as a type; [..., 2] for two in one. 16-bit floats become float32."""
    if type_ == "pred":
        return bits
    if type_.endswith("x2"):
        bits = np.ascontiguousarray(bits)[..., None].view(UNSIGNED[bits_of(type_) // 2])
        type_ = type_[:-2]
    if type_ == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if type_ == "f16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view({"f": "f", "s": "i"}.get(type_[0], "u") + str(bits_of(type_) // 8))


def encoded(type_: str, values: Any) -> np.ndarray:
    """Return the bits of values as a type: floats rounded to the nearest, integers cut off."""
    if type_.endswith("x2"):
        halves = np.ascontiguousarray(encoded(type_[:-2], values))
        return halves.view(UNSIGNED[bits_of(type_)])[..., 0]
    bits = bits_of(type_)
    if type_ == "bf16":
        of_float = np.asarray(values, np.float32).view(np.uint32)
        rounded = (of_float + np.uint32(0x7FFF) + (of_float >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)
    kind = "f" if type_[0] == "f" else "i" if type_[0] == "s" else "u"
    to = np.bool_ if bits == 1 else f"{kind}{bits // 8}"
    return np.asarray(values).astype(to, copy=False).view(UNSIGNED[bits])


# --- Operands -----------------------------------------------------------------------------------------------------


def _constant(text: str, type_: str) -> np.ndarray:
    bits = bits_of(type_)
    number = int(re.sub("^0[fF]", "0x", text).rstrip("U"), 0)
    if type_ == "pred":
        return np.bool_(number)
    return decoded(type_, np.array(number & (1 << bits) - 1, f"u{bits // 8}"))


def reader(program: Program, text: str, type_: str) -> Read:
    """Return a function that reads an operand of a type: a register, its low bits if it is wider, or a constant."""
    if text == "global_smem":
        text = "0"
    if not text.startswith("%") and text not in program.widths:
        constant = _constant(text, type_)
        return lambda machine: constant
    bits = UNSIGNED[bits_of(type_)]
    undefined = encoded(f"b{bits_of(type_)}", -1) if type_ != "pred" else np.bool_(True)

    def read(machine: Machine) -> np.ndarray:
        found = machine.registers.get(text, undefined)  # NaN, where a register has not been written
        return decoded(type_, found if found.dtype == bits else found.astype(bits))

    return read


def writer(program: Program, text: str, type_: str) -> Write:
    """Return a function that writes values of a type to a register, extended by their sign or zeros if it is wider."""
    if text == "_":
        return lambda machine, values, mask: None
    width = UNSIGNED[program.widths[text]]

    def write(machine: Machine, values: Any, mask: Mask) -> None:
        bits = encoded(type_, values)
        if bits.dtype != width:
            wide = bits.view(f"i{bits.itemsize}") if type_[0] == "s" else bits
            bits = wide.astype(f"i{width.itemsize}" if type_[0] == "s" else width).view(width)
        if mask is not None:
            bits = np.where(mask, bits, machine.registers.get(text, width.type(0)))
        machine.registers[text] = bits

    return write


def address_of(program: Program, text: str) -> Read:
    """Return a function that computes the address in brackets, one for each thread."""
    base, _, offset = text.strip("[] ").partition("+")
    base, more = base.strip(), int(offset or "0", 0)
    read = reader(program, base, "u64" if program.widths.get(base) == 64 else "u32")
    return lambda machine: np.broadcast_to(read(machine).astype(np.int64) + more, machine.threads)


def members(text: str) -> list[str]:
    """Return the registers in braces, or the one that is there."""
    return [one.strip() for one in text.strip("{}").split(",")]


def lanes_of(machine: Machine, mask: Mask) -> np.ndarray:
    return np.arange(machine.threads) if mask is None else np.flatnonzero(mask)


def warps_of(machine: Machine, mask: Mask) -> np.ndarray:
    """Return the numbers of the warps that execute an instruction, all of whose threads must do so."""
    if mask is None:
        return np.arange(machine.threads // 32)
    here = mask.reshape(-1, 32)
    if (here.any(1) != here.all(1)).any():
        raise Fault("an instruction of a warp that a part of its threads executes")
    return np.flatnonzero(here.all(1))


def by_warp(machine: Machine, values: np.ndarray) -> np.ndarray:
    """Return values of the threads as [warps, 32]."""
    return np.broadcast_to(values, machine.threads).reshape(-1, 32)
