"""What a router gives: its logits, and which function of them its weights are.

Shapes: T tokens, K experts a token, E experts, H model dim.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moetune.models.moe import MoeLayer

Score = Literal["softmax", "sigmoid"]
"""Of a router's logits, over all experts or of each."""


def logits_module(model: nn.Module, path: str, num_experts: int) -> nn.Module:
    """What gives the logits of the router at a path away (`find_logits`): the linear layer inside the router, if it has
    one with an output an expert, because Gemma 4's router itself gives probabilities; else the router."""
    router = model.get_submodule(path)
    inside = (module for module in router.modules() if module is not router and isinstance(module, nn.Linear))
    return next((linear for linear in inside if linear.out_features == num_experts), router)


def find_logits(output: Any, num_experts: int) -> Tensor | None:
    """The first float tensor of a router's output with a value for every expert."""
    candidates = output if isinstance(output, (tuple, list)) else (output,)
    for value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == num_experts:
            return value
    return None


def scores(logits_TE: Tensor, score: Score) -> Tensor:
    """In float32 at least."""
    wide = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return wide.softmax(-1) if score == "softmax" else wide.sigmoid()


def known_scores(model: nn.Module, layers: Iterable[MoeLayer]) -> dict[int, Score]:
    """`score_of` each layer where it is known, by the layer's index; layers that are alike are asked once."""
    asked: dict[Hashable, Score | None] = {}
    found: dict[int, Score] = {}
    for layer in layers:
        kind = type(model.get_submodule(layer.block)), layer.shape, layer.top_k
        if kind not in asked:
            asked[kind] = score_of(model, layer)
        if (score := asked[kind]) is not None:
            found[layer.index] = score
    return found


def score_of(model: nn.Module, layer: MoeLayer) -> Score | None:
    """The function of the logits that a chosen expert's weight is proportional to, whatever it is scaled with; None if
    it is neither, or the router keeps its logits to itself.

    A copy of the block is asked, with weights that are drawn, and a recorder in the place of its experts.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    logits: list[Tensor | None] = []

    class Recorder(nn.Module):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            seen.append((top_k_index, top_k_weights))
            return torch.zeros_like(hidden_states)

    block = copy.deepcopy(model.get_submodule(layer.block))
    inside = layer.experts.removeprefix(f"{layer.block}.")
    if inside == layer.experts or not layer.router.startswith(f"{layer.block}."):
        return None
    block.set_submodule(inside, Recorder())
    block = block.float().to_empty(device="cpu").eval()
    router = logits_module(block, layer.router.removeprefix(f"{layer.block}."), layer.shape.num_experts)
    router.register_forward_hook(lambda _, args, output: logits.append(find_logits(output, layer.shape.num_experts)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for tensor in (*block.parameters(), *block.buffers()):
            if tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
            else:
                tensor.zero_()
        try:
            block(torch.randn(1, 16, layer.shape.hidden))
        except Exception:  # a block that takes more than hidden states
            return None
    if not seen or not logits or logits[0] is None:
        return None
    (ids_TK, weights_TK), logits_TE = seen[0], logits[0].reshape(-1, layer.shape.num_experts)
    for score in ("softmax", "sigmoid"):
        scale_TK = weights_TK / scores(logits_TE, score).gather(1, ids_TK)
        if layer.top_k == 1:
            scale_TK = scale_TK.T  # one choice is in proportion to anything; it has to be over tokens
        if torch.allclose(scale_TK, scale_TK[:, :1].expand_as(scale_TK), rtol=1e-3):
            return score
    return None


def correction_bias(model: nn.Module, layer: MoeLayer) -> str | None:
    """The name of the buffer that is added to the scores [E] of a layer before its experts are chosen; None if there is
    none, or it is a parameter."""
    for name, buffer in model.get_submodule(layer.block).named_buffers():
        if name.rpartition(".")[2] == "e_score_correction_bias" and buffer.numel() == layer.shape.num_experts:
            return f"{layer.block}.{name}"
    return None
