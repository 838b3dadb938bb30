"""Tensors of a checkpoint that is published quantized, as transformers takes them: read when their turn comes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetune.models.hub.names import find_homes
from moetune.models.hub.quantized import BitsAndBytes, Mxfp4, Quantized, open_checkpoint
from moetune.models.hub.tensor_files import NAMES, Stored
from moetune.models.selection import Selection
from moetune.run.linears import linears_to_quantize
from moetune.run.names import stacks
from moetune.run.resolve import ResolvedModel


@dataclass(frozen=True)
class LazyTensor:
    """Stands for a slice of a safetensors file, which `[...]` reads.

    Attributes:
        device: where what is quantized is unpacked.
        stays: `[...]` gives it back as it is, because it may be kept packed.
    """

    stored: Stored
    device: torch.device
    stays: bool = False

    def __getitem__(self, everything: Any) -> Tensor | LazyTensor:
        return self if self.stays else self.read()

    def to(self, **_: Any) -> LazyTensor:
        return self

    def read(self) -> Tensor:
        """All of it, unpacked."""
        if isinstance(self.stored, Quantized):
            return self.stored.rows(device=self.device)
        return self.stored.rows().reshape(self.stored.shape)


def lazy_tensors(
    model: ResolvedModel, selection: Selection, folder: Path, device: torch.device
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint by the names that they have in 16 bits; what is quantized is unpacked on `device` in
    the model's dtype, as transformers does.

    Raises:
        UserError: the parts of a weight do not fit together.
    """
    opened = open_checkpoint(folder)
    may_stay = {name for name, stored in opened.items() if isinstance(stored, (Mxfp4, BitsAndBytes))}
    packed = {f"{path}.weight" for path in linears_to_quantize(model.plain, model.structure, selection)}
    packed |= {f"{layer.experts}.{stack}" for layer in model.structure.moe_layers for stack in stacks(layer)}
    homes = find_homes(model.plain, may_stay)
    stay = {key for name in packed & homes.keys() for key in homes[name].every_key()}
    tensors = {}
    for name, stored in opened.items():
        if isinstance(stored, Quantized):
            stored = replace(stored, dtype=NAMES[model.dtype])
        tensors[name] = LazyTensor(stored, device, stays=name in stay)
    return tensors
