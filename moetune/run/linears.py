"""Which linear layers are stored in base precision."""

from __future__ import annotations

import functools
import inspect
import re

from transformers import PreTrainedModel

from moetune.models.components import Component
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure

PACKED_COMPONENTS: tuple[Component, ...] = ("attention", "dense_mlp", "shared_experts")
_SMALLEST = 64  # a linear with fewer rows or columns (a scalar gate, say) is all precision and no memory: left alone


def linears_to_quantize(model: PreTrainedModel, structure: ModelStructure, selection: Selection) -> list[str]:
    """Paths of the linear layers that stay frozen, are worth packing and are only ever called."""
    return [
        path
        for path, linear in structure.linears().items()
        if linear.component in PACKED_COMPONENTS
        and min(linear.in_features, linear.out_features) >= _SMALLEST
        and f"{path}.weight" not in selection.full
        and not read_directly(model, path, or_its_dtype=True)
    ]


def read_directly(model: PreTrainedModel, path: str, *, or_its_dtype: bool = False) -> bool:
    """Whether the code around a linear layer uses its weight without calling it, as Mamba's fused kernels do.

    With `or_its_dtype` also whether it casts to that weight's dtype, uint8 once packed, as DeepSeek's indexer does.
    """
    parent, _, name = path.rpartition(".")
    unless = "" if or_its_dtype else r"(?!\.(dtype|device)\b)"
    kind: type = type(model.get_submodule(parent))
    return re.search(rf"\bself\.{name}\.weight\b{unless}", _source(kind)) is not None


@functools.cache
def _source(kind: type) -> str:
    """The code of a module's class and of what it inherits from other models."""
    return "".join(inspect.getsource(base) for base in kind.__mro__ if ".models." in base.__module__)
