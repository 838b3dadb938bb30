"""Which linear layers are stored in base precision."""

from __future__ import annotations

from transformers import PreTrainedModel

from moetune.compat.transformers import reads_weight
from moetune.models.components import Component
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure

QUANTIZED_COMPONENTS: tuple[Component, ...] = ("attention", "dense_mlp", "shared_experts")
_SMALLEST = 64  # a linear with fewer rows or columns (a scalar gate, say) is all precision and no memory: left alone


def linears_to_quantize(model: PreTrainedModel, structure: ModelStructure, selection: Selection) -> list[str]:
    """Paths of the linear layers that stay frozen, are worth quantizing and are only ever called."""
    return [
        path
        for path, linear in structure.linears().items()
        if linear.component in QUANTIZED_COMPONENTS
        and min(linear.in_features, linear.out_features) >= _SMALLEST
        and f"{path}.weight" not in selection.full
        and not read_directly(model, path, or_its_dtype=True)
    ]


def read_directly(model: PreTrainedModel, path: str, *, or_its_dtype: bool = False) -> bool:
    """Whether the code around a linear layer uses its weight, or with `or_its_dtype` its dtype, without calling it."""
    parent, _, name = path.rpartition(".")
    return reads_weight(model.get_submodule(parent), name, or_its_dtype=or_its_dtype)
