"""Checkpoints that are published quantized, seen as the tensors that they stand for.

Each weight of such a checkpoint is stored as several tensors, whose names say how:

    MXFP4    <w>_blocks, <w>_scales                                          a layer's experts (gpt-oss)
    FP8      <w>, <w>_scale_inv                                              a scale a block (DeepSeek-V3)
    4 bits   <w>, <w>.absmax, …, <w>.quant_state.bitsandbytes__<nf4 or fp4>  by bitsandbytes

`open_checkpoint` gives each under the one name, with the shape that a checkpoint in 16 bits has; its rows are computed
when they are asked for, as transformers and bitsandbytes compute them.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState, create_dynamic_map, dequantize_4bit
from bitsandbytes.utils import unpack_tensor_to_dict
from torch import Tensor
from typing_extensions import TypedDict

from moetune.documents import Amount, read_json
from moetune.errors import reading
from moetune.models.hub.tensor_files import NAMES, Stored, read_checkpoint

_PARTS = (
    re.compile(r"(.+)_(blocks|scales)"),
    re.compile(r"(.+\.weight)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"),
    re.compile(r"(.+\.weight)_(scale_inv)"),
)
"""What a part of a weight is called."""


@dataclass(frozen=True)
class Quantized(Stored, ABC):
    """A weight that is stored in `parts`, by the end of their names.

    Attributes:
        dtype: what its rows are computed in.
        file: that of its largest part.
    """

    parts: Mapping[str, Stored] = field(default_factory=dict, repr=False)

    @abstractmethod
    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Rows `start` to `stop` [stop - start, ...], computed on `device`."""

    def write(self, rows: Tensor, start: int = 0) -> None:
        raise AssertionError("what is quantized is not written to")


@dataclass(frozen=True)
class Mxfp4(Quantized):
    """A layer's experts [E, in, out], of blocks [E, out, in / 32, 16] and their scales [E, out, in / 32], all bytes."""

    def quantized(self, expert: int) -> dict[str, Tensor]:
        """What is stored of an expert, row by row of [out, in]: `data`, two weights a byte, and `scales`."""
        blocks, scales = (self.parts[name].rows(expert, expert + 1) for name in ("blocks", "scales"))
        return {"data": blocks.flatten(), "scales": scales.flatten()}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (self.parts[name].rows(start, stop).to(device) for name in ("blocks", "scales"))
        return convert_moe_packed_tensors(blocks, scales, dtype=self.torch_dtype)


@dataclass(frozen=True)
class BlockFp8(Quantized):
    """A matrix [out, in] of 8-bit floats, which are multiplied by a scale for each block [⌈out / b0⌉, ⌈in / b1⌉]: in
    float32, and rounded once, as transformers does."""

    block: tuple[int, int] = (128, 128)

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        high, wide = self.block
        weight = self.parts[""].rows(start, stop).to(device)
        first = start // high
        scales = self.parts["scale_inv"].rows(first, -(-(start + len(weight)) // high)).to(device).float()
        scales = scales.repeat_interleave(wide, 1)[:, : weight.shape[1]]
        rows = torch.empty(weight.shape, dtype=self.torch_dtype, device=device)
        for number, scale in enumerate(scales, first):  # a row of blocks at a time, in float32
            those = slice(max(number * high - start, 0), (number + 1) * high - start)
            rows[those] = weight[those].float() * scale
        return rows


@dataclass(frozen=True)
class BitsAndBytes(Quantized):
    """A matrix [out, in] in 4 bits; `state` is what bitsandbytes says of it in JSON."""

    state: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def blocks(self) -> Iterator[tuple[int, int]]:
        yield 0, self.num_rows  # which are unpacked at once

    def stored(self) -> dict[str, Tensor]:
        """The parts as bitsandbytes takes them: the bytes [.., 1] under an empty name, and what belongs to them."""
        parts = {name: part.rows().reshape(part.shape) for name, part in self.parts.items()}
        return parts | {"": parts[""].view(torch.uint8).reshape(-1, 1)}

    def is_nf4(self, *, double_quant: bool) -> bool:
        """Whether it is in the layout of QLoRA: 64 weights a scale; double-quantized, 256 scales a second one."""
        scales = self.state["blocksize"], self.state.get("nested_blocksize")
        if self.state["quant_type"] != "nf4" or scales != (64, 256 if double_quant else None):
            return False
        return not double_quant or self.parts["nested_quant_map"].rows().equal(create_dynamic_map())

    def quantized(self) -> dict[str, Tensor]:
        """What is stored of it in that layout."""
        parts = self.stored()
        nested = {}
        if "nested_absmax" in parts:
            nested = {"nested_absmax": parts["nested_absmax"], "offset": torch.tensor(self.state["nested_offset"])}
        return {"data": parts[""].flatten(), "absmax": parts["absmax"], **nested}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        parts = {name: part.to(device) for name, part in self.stored().items()}
        data = parts.pop("")
        state = QuantState.from_dict(parts, torch.device(device))
        state.dtype, state.shape = self.torch_dtype, torch.Size([self.numel])  # flat: on a CPU it is exact only so
        return dequantize_4bit(data, state).view(self.shape)[start:stop]


def open_checkpoint(folder: Path) -> dict[str, Stored]:
    """As `read_checkpoint`, with weights that are quantized under the names and in the shapes that they stand for.

    Raises:
        UserError: as `read_checkpoint`; or the parts of a weight do not fit together.
    """
    stored = read_checkpoint(folder)
    opened: dict[str, Stored] = {}
    for name, parts in _grouped(stored).items():
        if parts == {"": name}:
            opened[name] = stored[name]
            continue
        with reading(f"{name!r} in {str(folder)!r}"):
            opened[name] = _opened(folder, {part: stored[its] for part, its in parts.items()})
    return opened


def weights_of(names: Iterable[str]) -> list[str]:
    """The names that `open_checkpoint` gives to the tensors of these names."""
    return list(_grouped(names))


def _grouped(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Weight -> part -> name of the tensor; a tensor of the weight's own name is the part \"\"."""
    known = set(names)
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(known):
        weight, part = next(
            (match.groups() for pattern in _PARTS if (match := pattern.fullmatch(name)) is not None), (name, "")
        )
        if part and not (weight in known or {f"{weight}_blocks", f"{weight}_scales"} <= known):
            weight, part = name, ""  # it is only called so
        groups.setdefault(weight, {})[part.removeprefix("_")] = name
    return groups


class _Blocks(TypedDict):
    weight_block_size: tuple[Amount, Amount]


class _Config(TypedDict):
    quantization_config: _Blocks


def _opened(folder: Path, parts: Mapping[str, Stored]) -> Quantized:
    if "blocks" in parts:
        blocks, scales = parts["blocks"], parts["scales"]
        experts, out, groups, _ = blocks.shape
        _require(blocks.shape == (*scales.shape, 16) and blocks.dtype == scales.dtype == "U8", parts)
        return Mxfp4(blocks.file, "BF16", (experts, 32 * groups, out), 0, parts)
    weight = parts[""]
    if "scale_inv" in parts:
        high, wide = read_json(folder / "config.json", _Config)["quantization_config"]["weight_block_size"]
        rows, columns = weight.shape
        scales = parts["scale_inv"]
        _require(scales.shape == (-(-rows // high), -(-columns // wide)) and scales.dtype in ("F32", "BF16"), parts)
        return BlockFp8(weight.file, "BF16", weight.shape, 0, parts, (high, wide))
    (of_state,) = (part for name, part in parts.items() if name.startswith("quant_state."))
    state = unpack_tensor_to_dict(of_state.rows())
    shape = tuple(state["shape"])
    _require(weight.nbytes == -(-math.prod(shape) // 2), parts)
    dtype = NAMES[getattr(torch, state["dtype"])]
    return BitsAndBytes(weight.file, dtype, shape, 0, parts, state)


def _require(fits: bool, parts: Mapping[str, Stored]) -> None:
    if not fits:
        found = ", ".join(f"{name or 'weight'} {part.dtype} {[*part.shape]}" for name, part in parts.items())
        raise ValueError(f"its parts do not fit together: {found}")
