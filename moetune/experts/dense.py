"""DenseMixer's router gradient: the routing weights of experts that were not chosen.

With `train.dense_router_gradient`, forward is unchanged, and backward treats the router as if every expert had been
chosen. With dy the gradient of a layer's output, E_e(x) the output of expert e, and w_e the routing weight that e would
have,

    ∂L/∂w_e = ⟨dy, E_e(x)⟩    for every expert e, not only for the chosen ones

(Yao et al., "DenseMixer: Improving MoE Post-Training with Precise Router Gradient", 2025, and its released code,
github.com/yaof20/DenseMixer). The weight of an expert that was not chosen is its score times the factor that scales the
scores of the chosen experts; this factor is treated as a constant. Experts and the layers below get gradients only from
the tokens routed to them. experts/mlp.py computes the inner products.

Shapes: T tokens, K chosen experts per token, E experts.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moetune.models.moe import MoeLayer
from moetune.models.routers import ScoreFunction, apply_score, find_logits, logits_module


class DenseWeights:
    """Routing weights through which the experts that were not chosen give their router a gradient.

    They are computed from the routers' logits, which hooks record: call `watch` once, then `of` once for each forward
    pass of a layer. `scores` maps a layer's index to the score function of its router, "softmax" or "sigmoid".
    """

    def __init__(self, scores: Mapping[int, ScoreFunction]) -> None:
        self._scores = scores
        self._logits: dict[int, Tensor] = {}

    def watch(self, model: nn.Module, layers: tuple[MoeLayer, ...]) -> None:
        """Register forward hooks on the routers of `layers` that record their logits while gradients are enabled."""
        for layer in layers:
            router = logits_module(model, layer.router, layer.shape.num_experts)
            router.register_forward_hook(partial(self._record, layer.index, layer.shape.num_experts))

    def _record(self, layer: int, num_experts: int, module: nn.Module, args: Any, output: Any) -> None:
        """Save a router's logits [T, E] for `of`, as its forward hook; does nothing while gradients are disabled."""
        if torch.is_grad_enabled():
            logits = find_logits(output, num_experts)
            assert logits is not None, "its score was found by its logits"
            self._logits[layer] = logits.reshape(-1, num_experts)

    def of(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor | None:
        """Return weights [T, E] through which the experts that were not chosen give the layer's router a gradient.

        Such an expert has the weight s · Σw / Σs: s is its score (softmax or sigmoid of its logit), and the sums run
        over the token's chosen experts `ids_TK` [T, K], whose routing weights w are `weights_TK` [T, K]. The factor
        Σw / Σs is a constant in backward. Chosen experts have 0 here, because w itself carries their gradient. The
        paper is named in this file's docstring.

        The result is differentiable in the logits of the layer's last forward pass, which are forgotten: a second call
        before the next forward pass raises `KeyError`. None if gradients are disabled.
        """
        if not torch.is_grad_enabled():
            return None
        scores_TE = apply_score(self._logits.pop(layer), self._scores[layer])
        with torch.no_grad():
            scale_T1 = weights_TK.sum(-1, keepdim=True) / scores_TE.gather(1, ids_TK).sum(-1, keepdim=True)
        return (scores_TE * scale_T1).scatter(1, ids_TK, 0)
