"""A model's decoder stack and layers: `leave_out` skips layers, `made_alike` says which are identical."""

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_stack(model: PreTrainedModel) -> nn.Module:
    """Return the submodule whose first output is the last hidden states [batch, tokens, hidden]."""
    stack = model.get_decoder()
    if isinstance(stack, PreTrainedModel) and stack is not model:
        return stack if stack.get_output_embeddings() is None else decoder_stack(stack)  # Llama 4: a model with a head
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))


def below_head(model: PreTrainedModel) -> nn.Module:
    """Return the submodule that computes the last hidden states [batch, tokens, hidden], its first output, from the
    inputs of the model: the decoder stack, or what also embeds the tokens for it in a vision-language model."""
    stack = decoder_stack(model)
    base: Any = model.base_model
    holds_stack = base is not model and any(module is stack for module in base.modules())
    has_towers = model.config.get_text_config() is not model.config
    return base if holds_stack and has_towers and base.get_output_embeddings() is None else stack


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return module path -> decoder layer, in the order of the forward pass."""
    return {path: module for path, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def every_layer(model: nn.Module) -> dict[str, nn.Module]:
    """Return module path -> decoder layer, in the order of the forward pass, those that are left out too."""
    kinds = (GradientCheckpointingLayer, LeftOut)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


class _LastReturned:
    """Forward hook of the layers that run: `rest` are the last one's outputs after the hidden states, for `LeftOut`;
    `hidden` is what a stage of a pipeline received.

    Tensors of `rest` are weak references. `rest` is None if that layer returned hidden states alone.
    """

    hidden: Tensor | None = None

    def __init__(self) -> None:
        self.rest: tuple[Any, ...] | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        is_tuple = isinstance(output, tuple)
        self.rest = tuple(ref(part) if isinstance(part, Tensor) else part for part in output[1:]) if is_tuple else None


class LeftOut(nn.Module):
    """Replacement for a decoder layer that is skipped; other attributes are read from the original layer.

    Forward returns its input, followed by the outputs, other than hidden states, of the last layer that ran.
    """

    def __init__(self, layer: nn.Module, last: _LastReturned) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)  # past nn.Module, which would register a submodule
        self._last = last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LeftOut":
        return LeftOut(self._layer, copy.deepcopy(self._last, memo))

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        rest = self._last.rest
        if rest is None:
            return hidden_states
        return hidden_states, *(part() if isinstance(part, ref) else part for part in rest)


def leave_out(model: nn.Module, layers: Collection[int]) -> None:
    """Replace the decoder layers with the indices `layers`, in place, so that the forward pass skips them."""
    last = _LastReturned()
    for number, (path, layer) in enumerate(every_layer(model).items()):
        if isinstance(layer, LeftOut):
            continue
        if number in layers:
            model.set_submodule(path, LeftOut(layer, last))
        else:
            layer.register_forward_hook(last)


@contextmanager
def with_every_layer(model: nn.Module) -> Iterator[None]:
    """Within the `with` block, put copies of the layers that are left out, on the meta device, in their places."""
    left_out = {path: layer for path, layer in every_layer(model).items() if isinstance(layer, LeftOut)}
    for path, layer in left_out.items():
        model.set_submodule(path, copy.deepcopy(layer.__dict__["_layer"]))
    try:
        yield
    finally:
        for path, layer in left_out.items():
            model.set_submodule(path, layer)


# --- Stages of a pipeline ---------------------------------------------------------------------------------------------


class _Received(LeftOut):
    """Stands before a stage's first layer: returns the hidden states that the stage received."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self._last.hidden


class _Reached(Exception):
    """Ends the forward pass of a stage after its last layer; `args` has the hidden states."""


class _End(LeftOut):
    """Stands after a stage's last layer, and ends the forward pass there."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(hidden_states)


class AbsentTable(nn.Module):
    """Replacement for an embedding or LM head whose weights this process lacks; other attributes are the original's.

    Called with token ids, it returns zeros [..., hidden] that take the memory of one element: the stage replaces them.
    They are on the `device` of the stage: the code of Llama 4 has sent the ids to the original's, meta.
    """

    device: torch.device | None = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)  # past nn.Module, which would register a submodule
        weight: Any = module.weight
        self.width, self.dtype = weight.shape[-1], weight.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AbsentTable":
        return AbsentTable(self._module)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device or ids.device).expand(*ids.shape, self.width)


class StageLayers:
    """Runs one stage of a model: some consecutive decoder layers, and what comes before the first or after the last.

    `layers` are their indices. Layers of other stages must be in the model's place, or left out (`leave_out`).
    """

    def __init__(self, model: PreTrainedModel, layers: range) -> None:
        self._model, self._last, paths = model, _LastReturned(), every_layer(model)
        self.is_last = layers.stop == len(paths)
        self._swaps: dict[str, nn.Module] = {}
        for number, (path, layer) in enumerate(paths.items()):
            if number == layers.stop:
                self._swaps[path] = _End(layer, self._last)
            elif number == layers.start - 1 or (number < layers.start and not isinstance(layer, LeftOut)):
                self._swaps[path] = _Received(layer, self._last)

    @contextmanager
    def entered(self, hidden: Tensor | None) -> Iterator[None]:
        """Within the `with` block the model runs this stage alone, on `hidden` in place of the layers before it."""
        before = {path: self._model.get_submodule(path) for path in self._swaps}
        try:
            self._last.hidden = hidden
            embedding = self._model.get_input_embeddings()
            if isinstance(embedding, AbsentTable) and hidden is not None:
                embedding.device = hidden.device
            for path, module in self._swaps.items():
                self._model.set_submodule(path, module)
            yield
        finally:
            for path, module in before.items():
                self._model.set_submodule(path, module)
            self._last.hidden = None

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the hidden states after the last layer of a stage that is not the model's last, or after the final
        norm; call it within `entered`. `inputs` are those of the model's forward pass."""
        try:
            return below_head(self._model)(**inputs, use_cache=False)[0]
        except _Reached as reached:
            return reached.args[0]


# --- Identical layers -------------------------------------------------------------------------------------------------


_KNOWN: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def made_alike(model: PreTrainedModel) -> dict[str, str]:
    """Return path -> digest of all that the memory of a decoder layer depends on (`_make`), for each layer; layers with
    equal digests are identical unless different parts of them train."""
    if model not in _KNOWN:  # a plain model is never modified
        layers = decoder_layers(model).items()
        _KNOWN[model] = {path: sha256(repr([*_make(layer)]).encode()).hexdigest() for path, layer in layers}
    return _KNOWN[model]


_NUMBERS = ("layer_idx", "layer_index", "layer_id", "block_idx", "layer_number", "depth")
"""Attributes in which modules keep the number of their layer, which differs between identical layers."""


def _make(layer: nn.Module) -> Iterator[Hashable]:
    """Yield what a layer's memory depends on, for the layer and each module in it: path, class, plain attributes except
    the layer's number, and names, shapes and dtypes of tensors."""
    for path, module in layer.named_modules():
        settings = tuple(
            (name, value)
            for name, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str, type(None))) and name not in _NUMBERS
        )
        tensors = tuple(
            (name, tuple(tensor.shape), tensor.dtype)
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        )
        yield path, type(module), settings, tensors
