"""The linear layers outside of experts that are stored in the precision `model.base`, because they stay frozen."""

from __future__ import annotations

from transformers import PreTrainedModel

from moetune.compat.transformers import reads_weight
from moetune.models.components import Component
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure

QUANTIZED_COMPONENTS: tuple[Component, ...] = ("attention", "dense_mlp", "shared_experts")
"""Components whose frozen linear layers are quantized. Embeddings, routers, norms and the LM head never are."""
_SMALLEST = 64  # rows and columns: smaller layers, such as a scalar gate, save no memory worth the lost precision


def linears_to_quantize(model: PreTrainedModel, structure: ModelStructure, selection: Selection) -> list[str]:
    """Return the paths of the linear layers to store in the precision `model.base`.

    A layer is listed if it is of a quantized component, stays frozen, has at least 64 rows and columns, and if the
    model only calls it, so that replacing the layer has no effect elsewhere.

    Args:
        model: the model as transformers builds it; the meta device will do.
        selection: what trains.
    """
    return [
        path
        for path, linear in structure.linears().items()
        if linear.component in QUANTIZED_COMPONENTS
        and min(linear.in_features, linear.out_features) >= _SMALLEST
        and f"{path}.weight" not in selection.full
        and not read_directly(model, path, or_its_dtype=True)
    ]


def read_directly(model: PreTrainedModel, path: str, *, or_its_dtype: bool = False) -> bool:
    """Return whether the parent module's code uses a linear layer's weight without calling the layer.

    Args:
        or_its_dtype: return True as well if the code reads the dtype of the weight.
    """
    parent, _, name = path.rpartition(".")
    return reads_weight(model.get_submodule(parent), name, or_its_dtype=or_its_dtype)
