"""Llama 4's blocks of experts: each expert computes the tokens that chose it, as other models' do.

transformers 5 gives every token to every expert, its input multiplied by the sigmoid of the router's logit, or by 0 if
the token chose others; and an expert makes 0 of 0.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):  # which transformers 5.24.0's Llama 4 reads of the text's
    MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]

FLAGS = {"has_gate": True, "is_transposed": True, "is_concatenated": True}
"""The flags of Llama 4's experts (models/moe.py) that are true."""


class _Block:
    """What a block of experts inherits before its own class. Its experts have the forward signature of others."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's output [T, H] and the router's logits [T, E], as the model's own class does."""
        x_TH = hidden_states.reshape(-1, self.hidden_dim)
        scores_TE, logits_TE = self.router(x_TH)
        score_T1, ids_T1 = scores_TE.topk(1, dim=-1)
        shared_TH: Tensor = self.shared_expert(x_TH)
        return shared_TH + self.experts(x_TH * score_T1, ids_T1, torch.ones_like(score_T1)), logits_TE


class Experts:
    """What a module of experts inherits before its own class.

    Its weights are stored [in, out], which the own class does not say, so PEFT takes them for [out, in].
    """

    def _apply_gate(self: Any, gate_up_NO: Tensor) -> Tensor:
        gate_NI, up_NI = gate_up_NO.chunk(2, dim=-1)
        act_NI: Tensor = up_NI * self.act_fn(gate_NI)
        return act_NI


def choose_before_experts(model: nn.Module) -> list[nn.Module]:
    """Change Llama 4's blocks with one expert per token in place, and return their modules of experts.

    These have no forward pass that fits any more: an `ExpertBank` replaces them.
    """
    changed: list[nn.Module] = []
    for module in [*model.modules()]:
        experts: Any = getattr(module, "experts", None)
        if type(module).__name__ == "Llama4TextMoe" and getattr(module, "top_k", None) == 1:
            for part, added in ((module, _Block), (experts, Experts)):
                part.__class__ = type(type(part).__name__, (added, type(part)), {})
            changed.append(experts)
    return changed
