"""Readers of checkpoints published in MXFP4, NVFP4, block FP8 or bitsandbytes 4 bits: rows dequantized on demand.

A quantized weight is stored in several tensors, named by a pattern:

    MXFP4    <w>_blocks, <w>_scales                                          a layer's experts (gpt-oss)
    NVFP4    <w>, <w>_scale, <w>_scale_2                                     ModelOpt
             <w>_packed, <w>_scale, <w>_global_scale                         compressed-tensors
    FP8      <w>, <w>_scale_inv                                              a scale for each block (DeepSeek-V3)
    4 bits   <w>, <w>.absmax, …, <w>.quant_state.bitsandbytes__<nf4 or fp4>  bitsandbytes

`open_checkpoint` returns one entry for each weight, under the name and with the shape that it has in 16 bits. Rows are
dequantized when they are read, with the results of transformers, compressed-tensors, ModelOpt and bitsandbytes. Scales
of activations and of the key-value cache are left out, because activations are computed unquantized.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from moetune.compat.bitsandbytes import QuantState, create_dynamic_map, dequantize_4bit, unpack_tensor_to_dict
from moetune.config.schema import FP8_BLOCK, NV_BLOCK
from moetune.errors import reading
from moetune.json_files import Amount, read_json
from moetune.tensor_files import NAMES, Stored, read_headers

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PARTS = (
    re.compile(r"(.+)_(blocks|scales)"),
    re.compile(r"(.+\.weight)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"),
    re.compile(r"(.+\.weight)_(scale_inv|packed|scale|scale_2|global_scale)"),
)
"""Patterns of the names of stored parts: group 1 is the weight's name, group 2 the part."""
_OF_ACTIVATIONS = re.compile(r".+\.(input_scale|input_global_scale|k_scale|v_scale)")
"""Pattern of the names of tensors that are left out."""


@dataclass(frozen=True)
class Quantized(Stored, ABC):
    """A weight that is stored quantized, in several tensors.

    Attributes:
        file: file of the weight's largest part.
        dtype: dtype of dequantized rows, in safetensors' spelling.
        shape: shape of the dequantized weight.
        offset: not used.
        parts: suffix of the part's tensor name (`scales`, `absmax`, …; empty for the weight's own name) -> the tensor.
    """

    parts: Mapping[str, Stored] = field(default_factory=dict, repr=False)

    @abstractmethod
    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the dequantized rows [start, stop) as a tensor [stop - start, ...] in `dtype` on `device`.

        None for `stop` is the end.
        """

    def write(self, rows: Tensor, start: int = 0) -> None:
        """Raise `AssertionError`: quantized weights are read only."""
        raise AssertionError("what is quantized is not written to")


@dataclass(frozen=True)
class Mxfp4(Quantized):
    """A layer's experts in MXFP4, dequantized to [E, in, out].

    Parts are uint8: `blocks` [E, out, in / 32, 16], two 4-bit floats per byte, and `scales` [E, out, in / 32],
    exponents + 127.
    """

    def quantized(self, expert: int) -> dict[str, Tensor]:
        """Return one expert's stored bytes, flat uint8 in the order [out, in]: `data` [out · in / 2] and `scales`
        [out · in / 32]."""
        blocks, scales = (self.parts[name].rows(expert, expert + 1) for name in ("blocks", "scales"))
        return {"data": blocks.flatten(), "scales": scales.flatten()}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (self.parts[name].rows(start, stop).to(device) for name in ("blocks", "scales"))
        return convert_moe_packed_tensors(blocks, scales, dtype=self.torch_dtype)


@dataclass(frozen=True)
class BlockFp8(Quantized):
    """A matrix [out, in] of 8-bit floats with a scale for each block of (b0, b1) weights: [⌈out / b0⌉, ⌈in / b1⌉].

    Weight and scale are multiplied in float32 and rounded once to `dtype`, as transformers does.
    """

    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)

    def quantized(self) -> dict[str, Tensor]:
        """Return the stored tensors: `data` [out, in], the bits of the weights as uint8, and `scales` in float32."""
        return {"data": self.parts[""].rows().view(torch.uint8), "scales": self.parts["scale_inv"].rows().float()}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        high, wide = self.block
        weight = self.parts[""].rows(start, stop).to(device)
        first = start // high
        scales = self.parts["scale_inv"].rows(first, -(-(start + len(weight)) // high)).to(device).float()
        scales = scales.repeat_interleave(wide, 1)[:, : weight.shape[1]]
        rows = torch.empty(weight.shape, dtype=self.torch_dtype, device=device)
        for number, scale in enumerate(scales, first):  # one row of blocks at a time, to save memory
            those = slice(max(number * high - start, 0), (number + 1) * high - start)
            rows[those] = weight[those].float() * scale
        return rows


@dataclass(frozen=True)
class Nvfp4(Quantized):
    """A matrix [out, in] in NVFP4: 16 weights of a row share a scale of 8 bits (E4M3), and the matrix a global scale.

    Parts are "" or `packed` [out, in / 2] uint8, two E2M1 codes per byte, the first in the low bits; `scale` [out, in /
    16]; and one float32: `scale_2` (ModelOpt) is multiplied, `global_scale` (compressed-tensors) divided by. Rows are
    computed in float32 and rounded once to `dtype`, as by either library for bfloat16.
    """

    @property
    def fraction(self) -> Tensor:
        """The global scale as a factor and a divisor, of which one is 1: [2] float32."""
        name = "scale_2" if "scale_2" in self.parts else "global_scale"
        scale, one = self.parts[name].rows().float().reshape(1), torch.ones(1)
        return torch.cat([scale, one] if name == "scale_2" else [one, scale])

    def quantized(self) -> dict[str, Tensor]:
        """Return the stored tensors: `data` [out, in / 2] and `scales` [out, in / 16] as uint8, and `fractions`, the
        global scale as in `fraction`: factor and divisor, [2] float32."""
        codes, scales = self._stored(0, None)
        return {"data": codes, "scales": scales.view(torch.uint8), "fractions": self.fraction}

    def _stored(self, start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        codes = self.parts["packed" if "packed" in self.parts else ""]
        return codes.rows(start, stop), self.parts["scale"].rows(start, stop)

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        codes, scales = (part.to(device) for part in self._stored(start, stop))
        over, under = self.fraction.to(device)
        levels = torch.tensor(_E2M1, device=device)
        weights = levels[torch.stack([codes & 15, codes >> 4], -1).int()].view(*scales.shape, NV_BLOCK)
        weights *= (scales.float() * over / under)[..., None]
        return weights.flatten(1).to(self.torch_dtype)


@dataclass(frozen=True)
class BitsAndBytes(Quantized):
    """A matrix [out, in] that bitsandbytes quantized to 4 bits (NF4 or FP4).

    `state` is its `quant_state` from JSON: quantization type, block sizes, shape and dtype.
    """

    state: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, row after the last) of a single block: all rows are dequantized together."""
        yield 0, self.num_rows

    def stored(self) -> dict[str, Tensor]:
        """Return part -> tensor as bitsandbytes expects them: the weight's bytes [n, 1] have the empty name."""
        parts = {name: part.rows().reshape(part.shape) for name, part in self.parts.items()}
        return parts | {"": parts[""].view(torch.uint8).reshape(-1, 1)}

    def is_nf4(self, *, double_quant: bool) -> bool:
        """Return whether the matrix is in QLoRA's NF4 layout: 64 weights share a scale.

        With `double_quant`, scales must be quantized to 8 bits, 256 of them with one second scale; else they must be
        plain.
        """
        scales = self.state["blocksize"], self.state.get("nested_blocksize")
        if self.state["quant_type"] != "nf4" or scales != (64, 256 if double_quant else None):
            return False
        return not double_quant or self.parts["nested_quant_map"].rows().equal(create_dynamic_map())

    def quantized(self) -> dict[str, Tensor]:
        """Return the stored tensors of a matrix for which `is_nf4` is True.

        These are `data`, two weights per byte, and `absmax`, the scales; with double quantization also `nested_absmax`,
        the scales of the scales, and `offset`.
        """
        parts = self.stored()
        nested = {}
        if "nested_absmax" in parts:
            nested = {"nested_absmax": parts["nested_absmax"], "offset": torch.tensor(self.state["nested_offset"])}
        return {"data": parts[""].flatten(), "absmax": parts["absmax"], **nested}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        parts = {name: part.to(device) for name, part in self.stored().items()}
        data = parts.pop("")
        state = QuantState.from_dict(parts, torch.device(device))
        # The shape must be flat: only then is the result on a CPU exact.
        state.dtype, state.shape = self.torch_dtype, torch.Size([self.numel])
        return dequantize_4bit(data, state).view(self.shape)[start:stop]


def open_checkpoint(folder: Path) -> dict[str, Stored]:
    """Read the headers of a checkpoint; return weight name -> how to read it, a `Quantized` weight or, if it is not
    quantized, a `Stored` tensor.

    Raises:
        UserError: there are no safetensors in the folder, a file is damaged, a tensor is in two files, or the parts of
            a quantized weight do not fit together.
    """
    stored = read_headers(folder)
    opened: dict[str, Stored] = {}
    for name, parts in _grouped(stored).items():
        if parts == {"": name}:
            opened[name] = stored[name]
            continue
        with reading(f"{name!r} in {str(folder)!r}"):
            opened[name] = _opened(folder, {part: stored[its] for part, its in parts.items()})
    return opened


def weights_of(names: Iterable[str]) -> list[str]:
    """Return the weight names that `open_checkpoint` gives for a checkpoint with these tensor names."""
    return list(_grouped(names))


def _grouped(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return weight name -> part -> tensor name; a tensor with the weight's own name is the part ""."""
    known = {name for name in names if not _OF_ACTIVATIONS.fullmatch(name)}
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(known):
        weight, part = next(
            (match.groups() for pattern in _PARTS if (match := pattern.fullmatch(name)) is not None), (name, "")
        )
        others = {weight}, {f"{weight}_blocks", f"{weight}_scales"}, {f"{weight}_packed"}
        if part and not any(one <= known for one in others):
            weight, part = name, ""  # the other parts are missing: an ordinary tensor with such a name
        groups.setdefault(weight, {})[part.removeprefix("_")] = name
    return groups


class _Blocks(TypedDict):
    weight_block_size: tuple[Amount, Amount]


class _Config(TypedDict):
    quantization_config: _Blocks


def _opened(folder: Path, parts: Mapping[str, Stored]) -> Quantized:
    """Return the quantized weight that is stored as `parts`: suffix of a tensor's name -> the tensor.

    Raises:
        ValueError: dtypes or shapes of the parts do not fit together.
        UserError: the weight is in FP8, and config.json in `folder` does not have the block size.
    """
    if "blocks" in parts:
        blocks, scales = parts["blocks"], parts["scales"]
        experts, out, groups, _ = blocks.shape
        _require(blocks.shape == (*scales.shape, 16) and blocks.dtype == scales.dtype == "U8", parts)
        return Mxfp4(blocks.file, "BF16", (experts, 32 * groups, out), 0, parts)
    if {"scale_2", "global_scale"} & parts.keys():
        codes, scales = parts["packed" if "packed" in parts else ""], parts["scale"]
        rows, half = codes.shape
        (of_matrix,) = parts.keys() & {"scale_2", "global_scale"}
        kinds = codes.dtype, scales.dtype, parts[of_matrix].dtype, parts[of_matrix].numel
        _require(
            kinds == ("U8", "F8_E4M3", "F32", 1) and codes.shape == (scales.shape[0], NV_BLOCK // 2 * scales.shape[1]),
            parts,
        )
        return Nvfp4(codes.file, "BF16", (rows, 2 * half), 0, parts)
    weight = parts[""]
    if "scale_inv" in parts:
        high, wide = read_json(folder / "config.json", _Config)["quantization_config"]["weight_block_size"]
        rows, columns = weight.shape
        scales = parts["scale_inv"]
        _require(scales.shape == (-(-rows // high), -(-columns // wide)) and scales.dtype in ("F32", "BF16"), parts)
        return BlockFp8(weight.file, "BF16", weight.shape, 0, parts, (high, wide))
    _require(any(name.startswith("quant_state.") for name in parts), parts)
    (of_state,) = (part for name, part in parts.items() if name.startswith("quant_state."))
    state = unpack_tensor_to_dict(of_state.rows())
    shape = tuple(state["shape"])
    _require(weight.nbytes == -(-math.prod(shape) // 2), parts)
    dtype = NAMES[getattr(torch, state["dtype"])]
    return BitsAndBytes(weight.file, dtype, shape, 0, parts, state)


def _require(fits: bool, parts: Mapping[str, Stored]) -> None:
    """Raise `ValueError`, naming the dtypes and shapes of the parts, if `fits` is False."""
    if not fits:
        found = ", ".join(f"{name or 'weight'} {part.dtype} {[*part.shape]}" for name, part in parts.items())
        raise ValueError(f"its parts do not fit together: {found}")
