"""`Watched`: registers a model's tensors, layer boundaries and expert groups with a tracker."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from moetune.adapt.build import Adapted
from moetune.compat.bitsandbytes import Linear4bit
from moetune.compat.transformers import is_hyper_connection
from moetune.experts.bank import ExpertBank
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.nf4 import Nf4
from moetune.memory.kernels.attention import replace_attention
from moetune.memory.report import FORWARD_PHASES
from moetune.memory.time.work import WorkPart
from moetune.memory.trace.log import OUTSIDE
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import Gpu
from moetune.models.stack import decoder_layers
from moetune.parallel.ranks import local_tensor


class Watched:
    """A model prepared for training, whose tensors and layer boundaries can be registered with a tracker: call
    `tracker`, give the result to `add_to`, and compute within `watching`.

    Args:
        kept: numbers, in the whole model, of the decoder layers that run; None to number the layers from 0.
        gpu: GPU whose attention kernels and workspaces are assumed; None for a CPU.
        shards: parameter -> this rank's part of it, for parameters that an engine (DeepSpeed) partitions.

    Attributes:
        layers: number -> module, for the decoder layers that run.
        layer_of: parameter -> number of its decoder layer, for those inside of layers.
        named: module -> path, for the modules that reports name (`named_modules`).
        turns: how many micro-batches go through a layer before any goes through the next.
    """

    turns = 1

    def __init__(
        self,
        adapted: Adapted,
        kept: Sequence[int] | None = None,
        gpu: Gpu | None = None,
        shards: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.adapted, self.gpu = adapted, gpu
        self.capability = None if gpu is None else gpu.capability
        self.shards = shards or {}
        layers = decoder_layers(adapted.model)
        self.layers = dict(zip(range(len(layers)) if kept is None else kept, layers.values(), strict=True))
        self.layer_of = {p: number for number, layer in self.layers.items() for p in layer.parameters()}
        self.named = named_modules(adapted)

    def tracker(self, *, counts: bool = False, on_cpu: bool = False, condensed: bool = False) -> Tracker:
        """Return a new tracker, not yet active, that names this model's modules; `counts` makes it count FLOPs, bytes
        and launches of each operation, if there is a `gpu`. With `on_cpu` it adds a CPU's workspaces. `condensed`: as
        of `Tracker`."""
        parts = work_parts(self.adapted, self.named) if counts and self.gpu is not None else None
        return Tracker(self.named, capability=self.capability, parts=parts, on_cpu=on_cpu, condensed=condensed)

    def add_to(self, tracker: Tracker) -> None:
        """Add the storages of the model's weights, buffers and shards to a tracker, with labels and layer numbers."""
        labels, shards, model = labels_of(self.adapted), self.shards, self.adapted.model
        trained = self.adapted.trainable().values()
        trained_storages = {id(local_tensor(shards.get(p, p)).untyped_storage()) for p in trained}
        for tensor in (*tensors_of(model), *shards.values()):
            storage = id(tensor.untyped_storage())
            part = "trainable_weights" if storage in trained_storages else "frozen_weights"
            tracker.add(tensor, part, labels.get(storage, "other"))  # type: ignore[arg-type]
        banks = [module for module in model.modules() if isinstance(module, ExpertBank)]
        in_banks = {id(tensor.untyped_storage()) for bank in banks for tensor in tensors_of(bank)}
        for number, layer in self.layers.items():
            for tensor in tensors_of(layer):
                tracker.belongs(tensor, number, in_bank=id(tensor.untyped_storage()) in in_banks)

    @contextmanager
    def watching(self, tracker: Tracker, tracking: bool = True) -> Iterator[None]:
        """Record the model's operations, layer boundaries and expert groups in a tracker within the `with` block;
        without `tracking` no operations. For a GPU, `scaled_dot_product_attention` is replaced by the operator that
        runs on it."""
        first = next(self.adapted.model.parameters(), None)
        is_fake = tracking and first is not None and isinstance(local_tensor(first), FakeTensor)
        written = tracker.is_written if is_fake else None
        watching = self.adapted.expert_context.hooks.using(group=tracker.enter_experts, is_written=written)
        attention = nullcontext() if self.capability is None else replace_attention(self.capability)
        with self._cutting(tracker), watching, tracker if tracking else nullcontext(), attention:
            yield

    @contextmanager
    def _cutting(self, tracker: Tracker) -> Iterator[None]:
        """Record, by hooks, where each decoder layer's forward ends and its backward begins.

        If micro-batches run layer by layer, that is where the first of them begins the next layer, or its backward.
        """
        calls = Counter[tuple[int, int, bool]]()

        def cut(layer: int, *, backward: bool = False, at_last: bool = False) -> None:
            if backward or tracker.phase in FORWARD_PHASES:  # not in a recomputation
                calls[tracker.step, layer, backward] += 1
                if calls[tracker.step, layer, backward] % self.turns == (0 if at_last else 1 % self.turns):
                    tracker.cut(layer, backward=backward)

        def arrive(gradient: Tensor, *, turn: int, layer: int | None = None) -> None:
            tracker.take_turn(turn)
            if layer is not None:
                cut(layer, backward=True)

        def begin(module: nn.Module, args: Any, *, before: int) -> None:
            if before == OUTSIDE and args and args[0].requires_grad and tracker.phase == "forward":
                args[0].register_hook(partial(arrive, turn=tracker.turn))
            cut(before)

        def end(module: nn.Module, args: Any, output: Any, *, layer: int) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad and tracker.phase == "forward":
                hidden.register_hook(partial(arrive, turn=tracker.turn, layer=layer))
            if layer not in follows.values():
                cut(layer, at_last=True)

        # A layer's end is recorded where the next layer begins, because only then has the model freed its input.
        # `prepend` puts these hooks before FSDP2's: gathering weights is part of the layer that needs them.
        hooks, stages = [], [*self.adapted.run.held_layers(self.adapted.ranks.coordinates.pp).values()]
        follows = {later: layer for layer, later in pairwise(self.layers) if stages[layer] == stages[later]}
        for number, layer in self.layers.items():
            before = follows.get(number, OUTSIDE)
            hooks.append(layer.register_forward_pre_hook(partial(begin, before=before), prepend=True))
            hooks.append(layer.register_forward_hook(partial(end, layer=number), prepend=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def labels_of(adapted: Adapted) -> dict[int, str]:
    """Return id(storage) -> label for memory reports, for all weights and buffers of a model.

    A label names the component and, of quantized weights, the format: "attention", "experts, nf4". Trained LoRA factors
    and experts are labelled "lora" and "experts", and tensors of no known component "buffers".
    """
    run, nf4 = adapted.run, Nf4(adapted.run.config.model.double_quant).label
    components = {part.name.rpartition(".")[0]: part.component for part in run.structure.parameters}
    components |= {layer.experts: "experts" for layer in run.structure.moe_layers}
    labels = {}
    for path, module in adapted.model.named_modules():
        plain = path.replace(".base_layer", "")
        own = next((components[p] for p in (plain, plain.rpartition(".")[0]) if p in components), None)
        is_nf4 = isinstance(module, Linear4bit)
        stored = module.format.label if isinstance(module, QuantizedExperts) else nf4 if is_nf4 else ""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            label = own or "buffers"
            labels[id(local_tensor(tensor).untyped_storage())] = f"{label}, {stored}" if stored else label
        if is_nf4:
            for tensor in tensors_of(module):
                labels[id(tensor.untyped_storage())] = f"{own}, {stored}"
    for name, parameter in adapted.trainable().items():
        if run.parts[name] in ("lora", "experts"):
            labels[id(local_tensor(parameter).untyped_storage())] = run.parts[name]
    return labels


def named_modules(adapted: Adapted) -> dict[nn.Module, str]:
    """Return module -> path for the modules that a report names. They are at most two levels below a decoder layer or,
    outside of the layers, below the model; modules inside of a layer's experts and hyper-connections are left out."""
    layers = tuple(f"{path}." for path in decoder_layers(adapted.model))
    named, whole = {}, {layer.experts for layer in adapted.structure.moe_layers}
    whole |= {path for path, module in adapted.model.named_modules() if is_hyper_connection(module)}
    inside = tuple(f"{path}." for path in whole)
    for path, module in adapted.model.named_modules():
        layer = next((prefix for prefix in layers if path.startswith(prefix)), "")
        if path and not path.startswith(inside) and path[len(layer) :].count(".") <= 1:
            named[module] = path
    return named


_PARTS: Mapping[str, WorkPart] = {
    "attention": "attention",
    "experts": "experts",
    "router": "router",
    "shared_experts": "dense_mlp",
    "dense_mlp": "dense_mlp",
    "lm_head": "head_and_loss",
}
"""Component of a parameter -> part of a step; of a module with several components, the first decides."""


def work_parts(adapted: Adapted, named: Mapping[nn.Module, str]) -> dict[str, WorkPart]:
    """Return module path -> part of a step, from the kinds of parameters that each module holds (`_PARTS`).

    A module that holds attention and another kind, such as a decoder layer, is `rest` (residual additions). All modules
    inside an attention module are `attention`. The path "", for work outside all modules, is `head_and_loss`. `named`
    maps the modules to classify to their paths.
    """
    components = {part.name.rpartition(".")[0]: part.component for part in adapted.run.structure.parameters}
    components |= {layer.experts: "experts" for layer in adapted.structure.moe_layers}
    parts: dict[str, WorkPart] = {"": "head_and_loss"}
    head = adapted.model.get_output_embeddings()
    for module, path in named.items():
        inside = {component for owner, component in components.items() if f"{owner}.".startswith(f"{path}.")}
        inside = {"lm_head"} if module is head else inside - {"norm", "other"}  # a tied head has no parameter
        is_layer = "attention" in inside and len(inside) > 1
        known = [part for component, part in _PARTS.items() if component in inside and not is_layer]
        parts[path] = known[0] if known else "rest"
    of_attention = tuple(f"{path}." for path, part in parts.items() if part == "attention")
    return {path: "attention" if path.startswith(of_attention) else part for path, part in parts.items()}


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor of a model on this rank: parameters or local shards, buffers, states of 4-bit layers."""
    yield from (local_tensor(parameter) for parameter in model.parameters())
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, Linear4bit) and (state := getattr(module.weight, "quant_state", None)) is not None:
            yield from (state.absmax, state.code)
            if (nested := state.state2) is not None:
                yield from (state.offset, nested.absmax, nested.code)
