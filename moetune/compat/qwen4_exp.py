"""Qwen3.8's choice of keys: all at once where a row has no more than a query may choose.

transformers 5 chooses for each query by itself, in Python: launches for each, and a trace cannot read its values.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _Indexer:
    """What the module that chooses keys inherits before its own class."""

    def forward(self: Any, hidden_states: Tensor, angles: Any, attention_mask: Tensor, cache: Any) -> Tensor:
        """Return which keys each query attends to: bool [B, 1, queries, keys]. `attention_mask` is [B, 1, queries,
        keys], bool or added to scores. No gradient reaches the module's weights, here as in its own class."""
        if cache is not None or attention_mask.shape[-1] // self.compress_ratio > self.block_topk:
            chosen: Tensor = super().forward(hidden_states, angles, attention_mask, cache)  # type: ignore[misc]
            return chosen
        return attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0


def choose_all_at_once(model: nn.Module) -> None:
    """Change the modules of a model that choose keys, in place."""
    for module in model.modules():
        if type(module).__name__ == "Qwen4ExpTextQSAIndexer":
            module.__class__ = type(type(module).__name__, (_Indexer, type(module)), {})
