"""`open_checkpoint`: a checkpoint's weights, in 16 bits or quantized; rows dequantized on demand.

A quantized weight is stored in several tensors, named by a pattern:

    MXFP4    <w>_blocks, <w>_scales                                          a layer's experts (gpt-oss)
    NVFP4    <w>, <w>_scale, <w>_scale_2                                     ModelOpt
             <w>_packed, <w>_scale, <w>_global_scale                         compressed-tensors
    INT4     <w>_packed, <w>_scale, <w>_shape, <w>_zero_point                compressed-tensors
             <w less .weight>.qweight, ….qzeros, ….scales, ….g_idx           GPTQ, AWQ, AutoRound
    FP8      <w>, <w>_scale_inv or <w>_scale                                 for each block, row, matrix; MXFP8
    FP8, FP4 <w>, <w less .weight>.scale                                     DeepSeek-V4
    4 bits   <w>, <w>.absmax, …, <w>.quant_state.bitsandbytes__<nf4 or fp4>  bitsandbytes
             <w>s.<expert>.weight with those parts, <w>s.<expert>.bias       gpt-oss' experts, as Unsloth stores them

There is one entry for each weight, under the name and with the shape that it has in 16 bits. Rows are dequantized when
they are read, with the results of transformers, compressed-tensors, ModelOpt and bitsandbytes. Scales of activations
and of the key-value cache are left out, because activations are computed unquantized.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from moetune.errors import reading
from moetune.formats.base import Format, Parts, Quantized, require
from moetune.formats.table import FORMATS
from moetune.tensor_files import Stored, read_headers

_LAYOUTS = list(dict.fromkeys(layout for format in FORMATS.values() for layout in format.layouts))
_MAIN = {main for layout in _LAYOUTS for main in layout.MAIN}
_EITHER = ({"", "weight", "packed", "qweight", "blocks"}, {"scale", "scale_inv", "scales"}, {"scale_2", "global_scale"})
"""Sets of parts of which a weight has one: with two, it is not known which is right."""
_OF_ACTIVATIONS = re.compile(r".+\.(input_scale|input_global_scale|activation_scale|input_scale_ub|[qkv]_scale)")
"""Pattern of the names of tensors that are left out."""
_EXPERT_APART = re.compile(r"(.+\.mlp\.experts\.(?:gate_up|down)_proj)s\.(\d+)\.(?:weight|(bias))")
"""Pattern of the names of weights of gpt-oss that Unsloth stores apart, of which transformers has a stack."""


class StackedApart(Quantized):
    """All experts of a layer of gpt-oss, [E, in, out], or their biases [E, out], of a weight [out, in] for each.

    `parts` are the experts' weights by number, quantized or in 16 bits.
    """

    STACKS = True

    @classmethod
    def opened(cls, parts: Parts) -> Self:
        experts = {str(expert): parts[str(expert)] for expert in range(len(parts)) if str(expert) in parts}
        first = next(iter(parts.values()))
        require(len(experts) == len(parts) and all(part.shape == first.shape for part in parts.values()), parts)
        return cls(first.file, first.dtype, (len(parts), *reversed(first.shape)), 0, experts)

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        parts = [*self.parts.values()][start:stop]
        of_type = [replace(part, dtype=self.dtype) if isinstance(part, Quantized) else part for part in parts]
        return torch.stack([part.whole(device).to(self.torch_dtype).t() for part in of_type])

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        raise AssertionError("each expert has a format of its own")

    def quantized(self, expert: int = 0) -> dict[str, Tensor]:
        part = self.parts[str(expert)]
        assert isinstance(part, Quantized)
        return part.quantized()

    def is_in(self, format: Format) -> bool:
        return all(isinstance(part, Quantized) and part.is_in(format) for part in self.parts.values())


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
            of_parts = {part: stored[its] for part, its in parts.items()}
            if "blocks" not in parts and any(len(part.shape) == 3 for part in of_parts.values()):
                raise ValueError("a stack of matrices is read in MXFP4 alone")
            read = [one for layout in _LAYOUTS if (one := layout.opened(of_parts)) is not None]
            require(len(read) == 1 and all(len(parts.keys() & either) < 2 for either in _EITHER), of_parts)
            opened[name] = read[0]
    weights, stacks = dict[str, Stored](), dict[str, dict[str, Stored]]()
    for name, weight in opened.items():
        place, expert = _place_of(name)
        (weights if expert is None else stacks.setdefault(place, {}))[expert or place] = weight
    for name, experts in stacks.items():
        with reading(f"{name!r} in {str(folder)!r}"):
            weights[name] = StackedApart.opened(experts)
    return weights


def weights_of(names: Iterable[str]) -> list[str]:
    """Return the weight names that `open_checkpoint` gives for a checkpoint with these tensor names."""
    return list(dict.fromkeys(_place_of(name)[0] for name in _grouped(names)))


def _place_of(name: str) -> tuple[str, str | None]:
    """Return transformers' name of a weight, and the number of the expert if it is a part of a stack there."""
    if apart := _EXPERT_APART.fullmatch(name):
        return apart[1] + ("_bias" if apart[3] else ""), apart[2]
    return name.replace(".mlp.router.linear.", ".mlp.router."), None


def _grouped(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return weight name -> part -> tensor name; a tensor with the weight's own name is the part ""."""
    known = {name for name in names if not _OF_ACTIVATIONS.fullmatch(name)}
    groups: dict[str, dict[str, str]] = {}
    for name in sorted(known):
        stem, part, tail = next(
            ((*match.groups(), layout.TAIL) for layout in _LAYOUTS if (match := re.fullmatch(layout.PATTERN, name))),
            (name, "", ""),
        )
        if part and not any(known.issuperset(stem + end for end in main) for main in _MAIN):
            stem, part, tail = name, "", ""  # the other parts are missing: an ordinary tensor with such a name
        groups.setdefault(stem + tail, {})[part] = name
    return groups
