"""How transformers splits a model's attention over ranks, read off the plan that the model's class carries."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

SPLIT = ("colwise", "rowwise")
"""How a matrix is split."""
LEFT_ALONE = ("replicated_with_grad_allreduce",)
"""A norm over what is split: nothing to do while it is frozen."""


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Path, with `*` for a layer's number -> how it is split. Experts, which tp does not split, are not in it."""
    return {name: style for name, style in (model.tp_plan or {}).items() if ".experts" not in name}


def style_of(path: str, plan: Mapping[str, str]) -> str | None:
    """How a module is split."""
    return plan.get(re.sub(r"\.\d+\.", ".*.", path))
