"""Checkpoints that are published quantized, seen as the tensors that they stand for.

Each weight of such a checkpoint is stored as several tensors, whose names say how:

    mxfp4    <w>_blocks, <w>_scales                                          a layer's experts (gpt-oss)

`open_checkpoint` gives each under the one name, with the shape that a checkpoint in 16 bits has; its rows are computed
when they are asked for, as transformers and bitsandbytes compute them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moetune.errors import UserError
from moetune.hub.tensor_files import Stored, read_checkpoint

_PARTS = (
    re.compile(r"(.+)_(blocks|scales)"),
    re.compile(r"(.+\.weight)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"),
    re.compile(r"(.+\.weight)_(scale_inv)"),
)
"""What a part of a weight is called."""


@dataclass(frozen=True)
class Quantized(Stored):
    """A weight that is stored in `parts`, by the end of their names.

    Attributes:
        dtype: what its rows are computed in.
        file: that of its largest part.
    """

    parts: Mapping[str, Stored] = field(default_factory=dict, repr=False)

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Rows `start` to `stop` [stop - start, ...], computed on `device`."""
        raise NotImplementedError

    def write(self, rows: Tensor, start: int = 0) -> None:
        raise AssertionError("what is quantized is not written to")


@dataclass(frozen=True)
class Mxfp4(Quantized):
    """A layer's experts [E, in, out], of blocks [E, out, in / 32, 16] and their scales [E, out, in / 32], all bytes."""

    def packed(self, expert: int) -> dict[str, Tensor]:
        """What is stored of an expert, row by row of [out, in]: `data`, two weights a byte, and `scales`."""
        blocks, scales = (self.parts[name].rows(expert, expert + 1) for name in ("blocks", "scales"))
        return {"data": blocks.flatten(), "scales": scales.flatten()}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (self.parts[name].rows(start, stop).to(device) for name in ("blocks", "scales"))
        return convert_moe_packed_tensors(blocks, scales, dtype=self.torch_dtype)


def open_checkpoint(folder: Path) -> dict[str, Stored]:
    """As `read_checkpoint`, with weights that are quantized under the names and in the shapes that they stand for.

    Raises:
        UserError: as `read_checkpoint`; or the parts of a weight do not fit together.
    """
    stored = read_checkpoint(folder)
    opened: dict[str, Stored] = {}
    for name, parts in _grouped(stored).items():
        opened[name] = stored[name] if parts == {"": name} else _opened(name, {k: stored[v] for k, v in parts.items()})
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
        groups.setdefault(weight, {})[part] = name
    return groups


def _opened(name: str, parts: Mapping[str, Stored]) -> Quantized:
    if "blocks" in parts:
        blocks, scales = parts["blocks"], parts["scales"]
        fit = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16) and blocks.dtype == scales.dtype == "U8"
        if not fit:
            raise UserError(f"{str(blocks.file)!r}: {name}_blocks and {name}_scales are no MXFP4 weights of experts")
        experts, out, groups, _ = blocks.shape
        return Mxfp4(blocks.file, "BF16", (experts, 32 * groups, out), 0, parts)
    raise UserError(f"{name}: its parts ({', '.join(parts)}) are of no format that is known")
