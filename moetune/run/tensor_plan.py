"""How transformers splits a model's attention over `parallel.tp` ranks, by the plan of the model's class."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

SPLIT = ("colwise", "rowwise")
LEFT_ALONE = ("replicated_with_grad_allreduce",)
"""A norm of split heads: nothing to do while it is frozen."""


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return path, with `*` for a layer's number -> style. Experts, which tp does not split, are left out."""
    return {name: style for name, style in (model.tp_plan or {}).items() if ".experts" not in name}


def style_of(path: str, plan: Mapping[str, str]) -> str | None:
    """Return how a module is split."""
    return plan.get(re.sub(r"\.\d+\.", ".*.", path))
