"""A model's decoder stack and its layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from weakref import ref

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_stack(model: PreTrainedModel) -> nn.Module:
    """Return the module whose first output is the last hidden states."""
    stack = model.get_decoder()
    if isinstance(stack, PreTrainedModel) and stack is not model:
        return stack
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> layer, in the order of calls."""
    return {path: module for path, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


class _LastReturned:
    """A forward hook that keeps weak references to what a layer returns beside the hidden states."""

    def __init__(self) -> None:
        self.others: tuple[Any, ...] | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        is_tuple = isinstance(output, tuple)
        self.others = tuple(ref(one) if isinstance(one, Tensor) else one for one in output[1:]) if is_tuple else None


class LeftOut(nn.Module):
    """Stands in for a layer that does not run: returns its input, and what the last layer that ran returned beside.
    Other attributes are the layer's."""

    def __init__(self, layer: nn.Module, last: _LastReturned) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)  # not a submodule
        self._last = last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        others = self._last.others
        if others is None:
            return hidden_states
        return hidden_states, *(one() if isinstance(one, ref) else one for one in others)


def leave_out(model: nn.Module, layers: Collection[int]) -> None:
    """Make a model skip these of its decoder layers."""
    last = _LastReturned()
    for number, (path, layer) in enumerate(decoder_layers(model).items()):
        if number in layers:
            model.set_submodule(path, LeftOut(layer, last))
        else:
            layer.register_forward_hook(last)
