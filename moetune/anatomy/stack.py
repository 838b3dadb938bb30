"""Where a model's decoder stack is, and its layers."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_stack(model: PreTrainedModel) -> nn.Module:
    """The module whose first output is what the model's logits are computed of."""
    stack = model.get_decoder()
    if isinstance(stack, PreTrainedModel) and stack is not model:
        return stack
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer, in the order in which the model calls them."""
    return {path: module for path, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
