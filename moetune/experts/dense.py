"""A router's gradient through all experts (DenseMixer): forward as usual, backward as if every expert had been chosen.

With dy the gradient of a layer's output, E_e(x) the output of expert e and w_e the weight that it would have,

    ∂L/∂w_e = ⟨dy, E_e(x)⟩    for every expert e, not only for the chosen ones

(Yao et al., "DenseMixer: Improving MoE Post-Training with Precise Router Gradient", 2025, and its released code,
github.com/yaof20/DenseMixer). The weight of an expert that was not chosen is its score times the factor that scales the
chosen ones' scores, and that factor is a constant. Experts, and what is below them, get the gradients of the tokens
routed to them only. The inner products are computed in mlp.py.

Shapes: T tokens, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moetune.models.moe import MoeLayer
from moetune.models.routers import Score, find_logits, logits_module, scores


class DenseWeights:
    """The weights that the experts not chosen would have, computed from the routers' logits.

    Args:
        scores: layer index -> the function by which its router turns logits into weights.
    """

    def __init__(self, scores: Mapping[int, Score]) -> None:
        self._scores = scores
        self._logits: dict[int, Tensor] = {}

    def watch(self, model: nn.Module, layers: tuple[MoeLayer, ...]) -> None:
        """Hook the routers of a model, to record their logits."""
        for layer in layers:
            router = logits_module(model, layer.router, layer.shape.num_experts)
            router.register_forward_hook(partial(self._record, layer.index, layer.shape.num_experts))

    def _record(self, layer: int, num_experts: int, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            logits = find_logits(output, num_experts)
            assert logits is not None, "its score was found by its logits"
            self._logits[layer] = logits.reshape(-1, num_experts)

    def of(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor | None:
        """[T, E], 0 for the chosen, whose weights are the router's own; None where gradients are off."""
        if not torch.is_grad_enabled():
            return None
        scores_TE = scores(self._logits.pop(layer), self._scores[layer])
        with torch.no_grad():
            scale_T1 = weights_TK.sum(-1, keepdim=True) / scores_TE.gather(1, ids_TK).sum(-1, keepdim=True)
        return (scores_TE * scale_T1).scatter(1, ids_TK, 0)
