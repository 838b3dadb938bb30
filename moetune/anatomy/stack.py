"""Where a model's decoder stack is, and its layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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


class LeftOut(nn.Module):
    """In place of a layer that is not run. Whatever else a model asks of the layer, the layer answers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


def leave_out(model: nn.Module, layers: Collection[int]) -> None:
    """Lets a model pass these of its decoder layers by."""
    for number, (path, layer) in enumerate(decoder_layers(model).items()):
        if number in layers:
            model.set_submodule(path, LeftOut(layer))
