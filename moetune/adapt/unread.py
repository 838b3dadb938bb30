"""Tensors of a checkpoint that is published quantized, as transformers takes them: read when their turn comes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetune.hub.quantized import Mxfp4, Quantized, open_checkpoint
from moetune.hub.tensor_files import NAMES, Stored
from moetune.run.resolve import ResolvedModel


@dataclass(frozen=True)
class Unread:
    """Stands for a slice of a safetensors file: `[...]` reads it, or gives what is read expert by expert as it is."""

    stored: Stored
    device: torch.device

    def __getitem__(self, everything: Any) -> Tensor | Unread:
        if isinstance(self.stored, Mxfp4):
            return self
        if isinstance(self.stored, Quantized):
            return self.stored.rows(device=self.device)
        return self.stored.rows().reshape(self.stored.shape)

    def to(self, **_: Any) -> Unread:
        return self


def unread_tensors(model: ResolvedModel, folder: Path, device: torch.device) -> dict[str, Unread]:
    """The tensors of a checkpoint by the names that they have in 16 bits; what is quantized is computed on `device` in
    the model's dtype, as transformers does.

    Raises:
        UserError: the parts of a weight do not fit together.
    """
    return {
        name: Unread(replace(stored, dtype=NAMES[model.dtype]) if isinstance(stored, Quantized) else stored, device)
        for name, stored in open_checkpoint(folder).items()
    }
