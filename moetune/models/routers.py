"""Routers: where their logits are, and whether routing weights are their softmax or sigmoid.

Shapes: T tokens, K experts per token, E experts, H hidden size.
"""

import copy
from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moetune.models.moe import MoeLayer

ScoreFunction = Literal["softmax", "sigmoid"]
"""How a router turns logits into scores: softmax over all experts, or a sigmoid of each logit."""


def logits_module(model: nn.Module, path: str, num_experts: int) -> nn.Module:
    """Return the module whose output holds the logits of the router at `path`.

    This is a linear layer with one output per expert inside the router, if there is one, because Gemma 4's router
    itself returns probabilities; else the router. Where it has LoRA, it is PEFT's wrapper, whose output has the update.
    """
    router = model.get_submodule(path)
    if hasattr(router, "base_layer"):
        return router
    inside = (module for module in router.modules() if hasattr(module, "base_layer") or isinstance(module, nn.Linear))
    return next((linear for linear in inside if getattr(linear, "out_features", 0) == num_experts), router)


def find_logits(output: Any, num_experts: int) -> Tensor | None:
    """Return the first floating-point tensor [..., num_experts] in a router's output, a tensor or a sequence with
    tensors.

    None if there is none.
    """
    candidates = output if isinstance(output, (tuple, list)) else (output,)
    for value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == num_experts:
            return value
    return None


def apply_score(logits_TE: Tensor, score: ScoreFunction) -> Tensor:
    """Return the scores [T, E] of logits [T, E], computed in float32 or the logits' dtype, whichever is wider."""
    wide = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return wide.softmax(-1) if score == "softmax" else wide.sigmoid()


def score_functions(model: nn.Module, layers: Iterable[MoeLayer]) -> dict[int, ScoreFunction]:
    """Return layer index -> score function; layers whose function is not recognized are left out.

    `score_function` measures one layer for all with the same block class, expert shape and top_k.
    """
    by_kind: dict[Hashable, ScoreFunction | None] = {}
    functions: dict[int, ScoreFunction] = {}
    for layer in layers:
        kind = type(model.get_submodule(layer.block)), layer.shape, layer.top_k
        if kind not in by_kind:
            by_kind[kind] = score_function(model, layer)
        if (score := by_kind[kind]) is not None:
            functions[layer.index] = score
    return functions


def score_function(model: nn.Module, layer: MoeLayer) -> ScoreFunction | None:
    """Measure which score function the routing weights of a layer's chosen experts are proportional to.

    The block runs alone (`_alone`), with a module that records its inputs for the experts. None if the weights match
    neither function, if the router does not return its logits, or if the block cannot run alone.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    logits: list[Tensor | None] = []

    class Recorder(nn.Module):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            seen.append((top_k_index, top_k_weights))
            return torch.zeros_like(hidden_states)

    if (alone := _alone(model, layer, Recorder())) is None:
        return None
    block, tokens = alone
    router = logits_module(block, layer.router.removeprefix(f"{layer.block}."), layer.shape.num_experts)
    router.register_forward_hook(lambda _, args, output: logits.append(find_logits(output, layer.shape.num_experts)))
    with torch.no_grad():
        try:
            block(tokens)
        except Exception:  # a block that needs more inputs than hidden states
            return None
    if not seen or not logits or logits[0] is None:
        return None
    (ids_TK, weights_TK), logits_TE = seen[0], logits[0].reshape(-1, layer.shape.num_experts)
    for score in ("softmax", "sigmoid"):
        scale_TK = weights_TK / apply_score(logits_TE, score).gather(1, ids_TK)
        if layer.top_k == 1:
            scale_TK = scale_TK.T  # with one expert per token, compare the ratio over tokens instead
        if torch.allclose(scale_TK, scale_TK[:, :1].expand_as(scale_TK), rtol=1e-3):
            return score
    return None


@lru_cache(1)  # a plan resolves many runs of one model
def is_idle(model: nn.Module, layer: MoeLayer) -> bool:
    """Return whether no gradient of the loss reaches a layer's router, because a token's only expert has the weight 1,
    divided by itself. False if that is not known: if the block cannot run alone."""

    class Weighted(nn.Module):
        def forward(self, hidden_states: Tensor, _: Tensor, top_k_weights: Tensor) -> Tensor:
            return hidden_states * top_k_weights.sum(-1).reshape(*hidden_states.shape[:-1], 1)

    if layer.top_k > 1 or (alone := _alone(model, layer, Weighted())) is None:
        return False
    block, tokens = alone
    router = block.get_submodule(layer.router.removeprefix(f"{layer.block}."))
    with torch.enable_grad():
        try:
            output = block.requires_grad_()(tokens.requires_grad_())
        except Exception:
            return False
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
    steepest = max((p.grad.abs().max().item() for p in router.parameters() if p.grad is not None), default=0.0)
    return tokens.grad is not None and steepest < 1e-2 * tokens.grad.abs().max().item()


def _alone(model: nn.Module, layer: MoeLayer, experts: nn.Module) -> tuple[nn.Module, Tensor] | None:
    """Return a copy of a layer's block on the CPU, in float32 with random weights, and `experts` in place of its own;
    and 16 tokens [1, T, H] for it. None if its experts or its router are outside of it."""
    block = copy.deepcopy(model.get_submodule(layer.block))
    inside = layer.experts.removeprefix(f"{layer.block}.")
    if inside == layer.experts or not layer.router.startswith(f"{layer.block}."):
        return None
    block.set_submodule(inside, experts)
    block = block.float().to_empty(device="cpu").eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for tensor in (*block.parameters(), *block.buffers()):
            if tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
            else:
                tensor.zero_()
        return block, torch.randn(1, 16, layer.shape.hidden)


def correction_bias(model: nn.Module, layer: MoeLayer) -> str | None:
    """Return the full name of a layer's buffer `e_score_correction_bias` [E]; None if it has none.

    The buffer is added to the scores to choose experts, but not to routing weights.
    """
    for name, buffer in model.get_submodule(layer.block).named_buffers():
        if name.rpartition(".")[2] == "e_score_correction_bias" and buffer.numel() == layer.shape.num_experts:
            return f"{layer.block}.{name}"
    return None
