"""A model under a tracker: what it holds, where its layers begin and end, and the kernels of its card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.adapt.fake import tensors_of
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear
from moetune.memory.kernels import kernels_of
from moetune.memory.trace.log import OUTSIDE
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import Gpu
from moetune.models.stack import decoder_layers
from moetune.parallel.ranks import local_tensor


class Watched:
    """An adapted model whose storages a tracker follows.

    Args:
        kept: the numbers of the decoder layers that the model has; None if it has all.
        gpu: the card whose kernels run; None for the CPU's.
        shards: this rank's part of parameters that an engine divides.
    """

    def __init__(
        self,
        adapted: Adapted,
        kept: Sequence[int] | None = None,
        gpu: Gpu | None = None,
        shards: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        shards = shards or {}
        self.adapted, self.gpu = adapted, gpu
        layers = decoder_layers(adapted.model)
        self.layers = dict(zip(range(len(layers)) if kept is None else kept, layers.values(), strict=True))
        self.held = [*tensors_of(adapted.model), *shards.values()]
        trained = adapted.trainable().values()
        self.trained_storages = {id(local_tensor(shards.get(p, p)).untyped_storage()) for p in trained}
        self.named = named_modules(adapted)

    def add_to(self, tracker: Tracker) -> None:
        """Says what there is before anything runs."""
        labels = labels_of(self.adapted)
        for tensor in self.held:
            trains = id(tensor.untyped_storage()) in self.trained_storages
            label = labels.get(id(tensor.untyped_storage()), "other")
            tracker.add(tensor, "trainable_weights" if trains else "frozen_weights", label)
        for number, layer in self.layers.items():
            for tensor in tensors_of(layer):
                tracker.belongs(tensor, number)

    @contextmanager
    def watching(self, tracker: Tracker, tracking: bool = True) -> Iterator[None]:
        """Inside, what the model does is followed.

        Args:
            tracking: without it only layers and experts are noted.
        """
        watching = self.adapted.expert_context.hooks.using(group=tracker.enter_experts)
        tracked = tracker if tracking else nullcontext()
        with self._cutting(tracker), watching, tracked, kernels_of(self.gpu, tracker):
            yield

    @contextmanager
    def _cutting(self, tracker: Tracker) -> Iterator[None]:
        """Notes where layers end in forward and begin in backward."""

        def begin(module: nn.Module, args: Any, *, before: int) -> None:
            tracker.cut(before, backward=False)

        def end(module: nn.Module, args: Any, output: Any, *, layer: int) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad and tracker.phase == "forward":
                hidden.register_hook(lambda gradient: tracker.cut(layer, backward=True))
            if layer == numbers[-1]:
                tracker.cut(layer, backward=False)

        # A layer ends where the next one begins: by then the model has let go of its input. FSDP2's own hooks come
        # after the first of these and after the gradient's.
        numbers, hooks = list(self.layers), []
        for before, (number, layer) in zip([OUTSIDE, *numbers], self.layers.items(), strict=False):
            hooks.append(layer.register_forward_pre_hook(partial(begin, before=before), prepend=True))
            hooks.append(layer.register_forward_hook(partial(end, layer=number), prepend=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def labels_of(adapted: Adapted) -> dict[int, str]:
    """By the id of a storage, what a report calls its tensor: its component, and how it is stored if it is packed."""
    run, model = adapted.run, adapted.run.config.model
    stored = "nf4, double-quantized" if model.base == "nf4" and model.double_quant else model.base
    components = {part.name.rpartition(".")[0]: part.component for part in run.structure.parts}
    components |= {layer.experts: "experts" for layer in run.structure.moe_layers}
    labels = {}
    for path, module in adapted.model.named_modules():
        plain = path.replace(".base_layer", "")
        own = next((components[p] for p in (plain, plain.rpartition(".")[0]) if p in components), None)
        if isinstance(module, QuantizedExperts):
            own = "experts"
        packed = isinstance(module, (QuantizedExperts, QuantizedLinear, Linear4bit))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            label = own or "buffers"
            labels[id(local_tensor(tensor).untyped_storage())] = f"{label}, {stored}" if packed else label
        if isinstance(module, Linear4bit):
            for tensor in tensors_of(module):
                labels[id(tensor.untyped_storage())] = f"{own}, {stored}"
    for name, parameter in adapted.trainable().items():
        if run.parts[name] in ("lora", "experts"):
            labels[id(local_tensor(parameter).untyped_storage())] = run.parts[name]
    return labels


def named_modules(adapted: Adapted) -> dict[nn.Module, str]:
    """The modules that a report names: decoder layers, what they are made of, and what stands outside of them."""
    layers = tuple(f"{path}." for path in decoder_layers(adapted.model))
    experts = tuple(f"{layer.experts}." for layer in adapted.structure.moe_layers)
    named = {}
    for path, module in adapted.model.named_modules():
        layer = next((prefix for prefix in layers if path.startswith(prefix)), "")
        if path and not path.startswith(experts) and path[len(layer) :].count(".") <= 1:
            named[module] = path
    return named
