"""A router's gradient through all experts, as DenseMixer has it: forward as it is, backward as if all had been chosen.

With dy the gradient of a layer's output, E_e(x) the output of expert e and w_e the weight that it would have,

    ∂L/∂w_e = ⟨dy, E_e(x)⟩    for every expert e, and not only for those that were chosen

(Yao et al., "DenseMixer: Improving MoE Post-Training with Precise Router Gradient", 2025; as its released code,
github.com/yaof20/DenseMixer, has it). The weight of an expert that was not chosen is its score times what the chosen
ones' were scaled with, and the scale is a constant. Experts and what is below them get the gradients of those tokens
alone that were routed to them.

Shapes: T tokens, K experts a token, E experts, H model dim, I expert dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moetune.experts.kernels.grouped import Rows
from moetune.models.moe import MoeLayer
from moetune.models.routers import Score, find_logits, logits_module, scores

if TYPE_CHECKING:
    from moetune.experts.bank import ExpertBank


class DenseWeights:
    """Of each layer of a model, the weights that experts would have which are not chosen.

    Args:
        layers: with the function of the logits that their routers' weights are.
    """

    def __init__(self, model: nn.Module, layers: Mapping[MoeLayer, Score]) -> None:
        self._scores = {layer.index: score for layer, score in layers.items()}
        self._logits: dict[int, Tensor] = {}
        for layer in layers:
            router = logits_module(model, layer.router, layer.shape.num_experts)
            router.register_forward_hook(partial(self._saw, layer.index, layer.shape.num_experts))

    def _saw(self, layer: int, num_experts: int, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            logits = find_logits(output, num_experts)
            assert logits is not None, "its score was found by its logits"
            self._logits[layer] = logits.reshape(-1, num_experts)

    def of(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor | None:
        """[T, E], 0 for the chosen, whose weights are the router's own; None where no gradient is asked for."""
        if not torch.is_grad_enabled():
            return None
        scores_TE = scores(self._logits.pop(layer), self._scores[layer])
        with torch.no_grad():
            scale_T1 = weights_TK.sum(-1, keepdim=True) / scores_TE.gather(1, ids_TK).sum(-1, keepdim=True)
        return (scores_TE * scale_T1).scatter(1, ids_TK, 0)


def gradient_of_weights(bank: ExpertBank, x_TH: Tensor, dy_TH: Tensor) -> Tensor:
    """⟨dy, E_e(x)⟩ of every expert of a bank for every token: [T, E], in x's dtype.

    As ⟨W_dᵀ·dy, act⟩, so that no expert's output is computed: three products of [T, H] with a matrix of [H, I] for each
    expert. One expert's rows are alive at a time.
    """
    rows = Rows([len(x_TH)], None)
    columns = []
    for turn in map(bank.slot_of.__getitem__, bank.held):
        gate_up, down = bank.projections(range(turn, turn + 1), x_TH.dtype)
        dact_TI = down.grad_input(dy_TH, rows)
        act_TI = bank.act(gate_up.forward(x_TH, rows))
        column_T = torch.einsum("ti,ti->t", dact_TI, act_TI)
        if down.bias is not None:
            column_T += rows.dot(dy_TH, down.bias.to(dy_TH.dtype))
        columns.append(column_T)
        del dact_TI, act_TI
    return torch.stack(columns, 1)
