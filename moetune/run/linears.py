"""Linear layers outside of experts: their storage and split by `parallel.tp`; embeddings that may be on the host."""

import re
from collections import Counter
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from moetune.compat.transformers import looks_up, reads_weight, sends_back
from moetune.config.resolved import ResolvedModelConfig
from moetune.config.schema import BASE_PARTS, Storage
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure

_SMALLEST = 64  # rows and columns: smaller layers, such as a scalar gate, save no memory worth the lost precision
SPLIT = ("colwise", "rowwise")
"""Styles of `tp_plan` that divide a linear layer's weight over the ranks."""
LEFT_ALONE = ("replicated_with_grad_allreduce",)
"""Style of norms inside split heads, whose weight every rank holds whole.

Only a norm that trains would need its gradient summed over ranks.
"""


def linears_to_quantize(
    model: PreTrainedModel,
    structure: ModelStructure,
    selection: Selection,
    config: ResolvedModelConfig,
) -> dict[str, Storage]:
    """Return path -> storage of the linear layers to store in the precision `model.base`, whatever the checkpoint.

    They belong to one of `BASE_PARTS`: embeddings, routers, norms and the LM head never do. They stay frozen, and have
    at least 64 rows and columns. The model only calls them and does not read their weight, so they can be replaced.
    `model` may be on the meta device.
    """
    return {
        path: config.storage_of(linear.component, linear.layer)
        for path, linear in structure.linears().items()
        if linear.component in BASE_PARTS
        and min(linear.in_features, linear.out_features) >= _SMALLEST
        and f"{path}.weight" not in selection.full
        and not read_directly(model, path, or_its_dtype=True)
    }


def tables(model: PreTrainedModel, selection: Selection) -> dict[str, str | None]:
    """Return path -> why the table of an embedding must be in GPU memory, None if it need not, for each `nn.Embedding`.

    `model` may be on the meta device.
    """
    shared = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    reasons: dict[str, str | None] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            trains, is_tied = f"{path}.weight" in selection.full, shared[id(module.weight)] > 1
            parent, _, name = path.rpartition(".")
            is_anywhere = sends_back(model.get_submodule(parent), name)
            is_read = read_directly(model, path, or_its_dtype=not is_anywhere)
            is_read = is_read or not looks_up(module) or module.max_norm is not None
            why = {"it trains": trains, "it is tied to the LM head": is_tied, "its own code reads it": is_read}
            reasons[path] = next((reason for reason, holds in why.items() if holds), None)
    return reasons


def read_directly(model: PreTrainedModel, path: str, *, or_its_dtype: bool = False) -> bool:
    """Return whether the code of the module around the layer at `path` reads its weight without calling the layer.

    With `or_its_dtype`, reading the dtype of the weight counts too.
    """
    parent, _, name = path.rpartition(".")
    return reads_weight(model.get_submodule(parent), name, or_its_dtype=or_its_dtype)


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' plan for tensor parallelism: module path, with `*` for layer numbers -> style of split, such
    as `colwise`. Experts are left out: `parallel.tp` does not split them."""
    return {name: style for name, style in (model.tp_plan or {}).items() if ".experts" not in name}


def style_of(path: str, plan: Mapping[str, str]) -> str | None:
    """Return the style in which the module at `path` is split, such as `colwise`; None if the plan does not name it."""
    return plan.get(re.sub(r"\.\d+\.", ".*.", path))
