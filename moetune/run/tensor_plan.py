"""How transformers splits each attention module over the `parallel.tp` ranks, from the model class's `tp_plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

SPLIT = ("colwise", "rowwise")
"""Styles of `tp_plan` that divide a linear layer's weight over the ranks."""
LEFT_ALONE = ("replicated_with_grad_allreduce",)
"""Style of norms inside split heads, whose weight every rank holds whole.

Only a norm that trains would need its gradient summed over ranks.
"""


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return module path, with `*` for layer numbers -> style of split. `parallel.tp` does not split experts."""
    return {name: style for name, style in (model.tp_plan or {}).items() if ".experts" not in name}


def style_of(path: str, plan: Mapping[str, str]) -> str | None:
    """Return the style in which the module at `path` is split, such as `colwise`; None if the plan does not name it."""
    return plan.get(re.sub(r"\.\d+\.", ".*.", path))
