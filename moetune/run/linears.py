"""The frozen linear layers outside of experts that are stored in the precision `model.base`."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from moetune.compat.transformers import reads_weight
from moetune.models.components import Component
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure

QUANTIZED_COMPONENTS: tuple[Component, ...] = ("attention", "dense_mlp", "shared_experts")
"""Components whose frozen linear layers are quantized. Embeddings, routers, norms and the LM head never are."""
_SMALLEST = 64  # rows and columns: smaller layers, such as a scalar gate, save no memory worth the lost precision


def linears_to_quantize(
    model: PreTrainedModel,
    structure: ModelStructure,
    selection: Selection,
    leaves_out: Callable[[str], bool] = lambda _: False,
) -> list[str]:
    """Return the paths of the linear layers to store in the precision `model.base`.

    They belong to a quantized component, stay frozen, and have at least 64 rows and columns; the model only calls
    them, so that it does not see that they are replaced; and `leaves_out(path)` is False. `model` may be on the meta
    device.
    """
    return [
        path
        for path, linear in structure.linears().items()
        if linear.component in QUANTIZED_COMPONENTS
        and min(linear.in_features, linear.out_features) >= _SMALLEST
        and f"{path}.weight" not in selection.full
        and not leaves_out(path)
        and not read_directly(model, path, or_its_dtype=True)
    ]


def read_directly(model: PreTrainedModel, path: str, *, or_its_dtype: bool = False) -> bool:
    """Return whether a layer's parent uses its weight (with `or_its_dtype`, or its dtype) without calling the layer."""
    parent, _, name = path.rpartition(".")
    return reads_weight(model.get_submodule(parent), name, or_its_dtype=or_its_dtype)
