"""`build(run, device)`: the adapted model of a run, for training, counting and prediction."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, set_seed
from transformers.integrations.neftune import activate_neftune

from moetune.adapt.attention import Capability, attention_for, give_way_to_masks
from moetune.adapt.checkpointing import checkpoint_layers
from moetune.adapt.documents import split_by_documents
from moetune.adapt.guard import checked
from moetune.adapt.layers.norms import fuse_norms
from moetune.adapt.layers.rotary import fuse_rotary
from moetune.adapt.layers.routers import fuse_routers
from moetune.adapt.layers.table import keep_on_host
from moetune.adapt.lora import add_lora
from moetune.adapt.merged import round_linears
from moetune.adapt.packages import leave_out_broken_packages
from moetune.adapt.scans import recompute_scans
from moetune.adapt.validate import refuse_misplaced, refuse_unquantized
from moetune.adapt.weights.base import noting_base
from moetune.adapt.weights.published import read_published
from moetune.adapt.weights.quantized_base import read_quantized_base
from moetune.adapt.weights.random import fill_randomly
from moetune.adapt.weights.target import LoadTarget
from moetune.compat.peft import NoAdapters
from moetune.compat.transformers import keep_as_built, save_what_trains, set_attention
from moetune.config.schema import Part
from moetune.experts.bank import ExpertLora
from moetune.experts.context import ExpertContext
from moetune.experts.dense import DenseWeights
from moetune.experts.host import ExpertPrefetcher
from moetune.formats.checkpoint import open_checkpoint
from moetune.kernels.registry import use_kernels
from moetune.models.hub.fingerprint import Base
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.source import ADAPTED
from moetune.models.stack import with_every_layer
from moetune.models.structure import ModelStructure
from moetune.parallel.dispatch import TokenDispatcher
from moetune.parallel.distribute import distribute
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.dtypes import device_kind
from moetune.run.resolve import AnyRun, ResolvedRun, resolve


@dataclass(frozen=True)
class Adapted:
    """A model that is ready to train: what trains requires a gradient, all else is frozen.

    Frozen experts and most frozen linear layers are stored in the precision `model.base`, other frozen tensors in the
    dtype in which transformers loads them.

    Attributes:
        model: the model, or the part of it that this rank holds.
        ranks: the ranks of the run, as seen by this one.
        expert_context: settings and hooks that the model's expert banks share.
        held: the run with only the layers that this rank holds; None if it holds all.
    """

    run: ResolvedRun
    model: PreTrainedModel
    ranks: Ranks = SINGLE_RANK
    expert_context: ExpertContext = field(default_factory=ExpertContext)
    held: ResolvedRun | None = None

    @property
    def structure(self) -> ModelStructure:
        """The structure of what this rank holds."""
        return (self.held or self.run).structure

    @property
    def selection(self) -> Selection:
        """What trains on this rank, experts of other ranks included."""
        return (self.held or self.run).selection

    def part_of(self, name: str) -> Part:
        """Return the part (`router`, `experts`, `lora` or `other`) to which a name in `learned()` belongs."""
        return "router" if name in self.run.router_biases.values() else self.run.parts[name]

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """Return name -> parameter of all parameters that train.

        Under FSDP2 these are the sharded ones, which the optimizer updates, even while gathered weights are in their
        place.
        """
        return self._trainable

    @cached_property
    def _trainable(self) -> dict[str, nn.Parameter]:  # computed first while the model is being distributed
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def router_biases(self) -> dict[str, Tensor]:
        """Return name -> correction bias, float32 [E], of the routers whose bias is updated; equal on every rank.

        Empty unless `train.router_bias_rate` is set.
        """
        here = {layer.index for layer in self.structure.moe_layers}
        names = (name for layer, name in self.run.router_biases.items() if layer in here)
        return {name: self.model.get_buffer(name) for name in names}

    def learned(self) -> dict[str, Tensor]:
        """Return name -> tensor of all that a run changes: `trainable()` and `router_biases()`."""
        return {**self.trainable(), **self.router_biases()}

    def of_experts(self) -> list[nn.Parameter]:
        """Return the trained parameters that are in expert banks: whole experts and LoRA on experts."""
        banks = tuple(f"{layer.experts}." for layer in self.structure.moe_layers)
        return [p for name, p in self.trainable().items() if name.startswith(banks)]

    def expert_lora(self) -> list[tuple[MoeLayer, ExpertLora]]:
        """Return each layer that has LoRA on experts, with the factors in its bank."""
        layers = [layer for layer in self.structure.moe_layers if layer.index in self.selection.lora_experts]
        return [(layer, cast(ExpertLora, self.model.get_submodule(f"{layer.experts}.lora"))) for layer in layers]


def build(
    run: AnyRun,
    device: torch.device | str,
    on_read: Callable[[float], None] | None = None,
    ranks: Ranks = SINGLE_RANK,
    capability: Capability | None = None,
    *,
    compares: bool = True,
) -> Adapted:
    """Build the adapted model on `device`: load or draw weights, quantize, add LoRA and checkpointing, freeze the rest.

    With several ranks, build the part that this rank holds and distribute it. On `meta` the model has all parameters
    and buffers of the trained model without storage, and is not distributed yet; call `distribute` for that.

    Args:
        run: a resolved run, the values of a run file, or its path.
        on_read: called repeatedly while weights are read, with the fraction that has been read (0 to 1).
        ranks: the ranks of the run, as seen by this one.
        capability: on `meta`, the CUDA compute capability of the GPU that the model is built for, None for a CPU;
            ignored on a GPU, which is asked for its own.
        compares: on a GPU, compare the kernels first (adapt/guard); False for the model in which they are compared.

    Raises:
        UserError: the run cannot be resolved, the weights cannot be read or do not fit the model, or a tensor is not in
            the precision or on the device that the run file sets.
    """
    device = torch.device(device)
    run = resolve(run, device_kind(device))
    if device.type == "cuda":
        run = checked(run, device, ranks) if compares else run
        capability = torch.cuda.get_device_capability(device)
        use_kernels(but=run.config.hardware.without_kernels)
    whole = run
    if not ranks.is_single:
        ranks = replace(ranks, placement=run.placed_at(ranks.coordinates.ep))
        run = run.held_at(ranks.coordinates.pp)
    config, structure, selection = run.config, run.structure, run.selection
    model = copy.deepcopy(run.model.plain)
    set_attention(model.config, attention_for(config, run.model.plain, device, capability))
    for path in run.tables_on_host:
        embedding = model.get_submodule(path)
        assert isinstance(embedding, nn.Embedding)
        keep_on_host(embedding)
    dense = DenseWeights(run.router_scores) if config.train.dense_router_gradient else None
    context = replace(_context(run, ranks, device, dense), capability=capability)

    set_seed(config.train.seed)
    is_drawn = device.type == "meta" or config.model.weights == "random"
    is_checkpoint = not is_drawn and run.model.source.quantized_base is None
    target = LoadTarget(
        model,
        whole.structure,
        whole.selection,
        config.model,
        run.quantized_linears,
        device,
        context=context,
        placement=ranks.placement,
        on_read=on_read if is_checkpoint else None,
    )
    if is_drawn:
        fill_randomly(target)
    elif is_checkpoint:
        read_published(target, whole.model)
    else:
        read_quantized_base(target, run, ranks, on_read)
    model.requires_grad_(False)
    model.to(device)  # type: ignore[arg-type]  # its signature is that of the function it wraps
    recompute_scans(model)
    if config.packs:
        split_by_documents(model)
    give_way_to_masks(model)
    fuse_norms(model)
    fuse_rotary(model)
    fuse_routers(model)

    trained = [parameter for name, parameter in model.named_parameters() if name in selection.full]
    assert len(trained) == len(selection.full), "a selected parameter is not in the built model"
    # On a GPU or CPU also on layers of other stages, so that a layer's factors do not depend on the rank that holds it.
    of, on_meta = (run, True) if device.type == "meta" else (whole, False)
    linears, held = of.structure.lora_layers(), structure.lora_layers()
    lora_ranks = {
        path: of.selection.ranks[path]
        for path in of.selection.lora_linears
        if path in held or linears[path].layer is not None
    }
    if of.selection.lora is not None and lora_ranks:
        with nullcontext() if on_meta else with_every_layer(model):
            # PEFT freezes all parameters except its own factors
            add_lora(model, lora_ranks, of.selection.lora, of.structure.linears(), on_meta=on_meta)
    if run.rounding is not None:
        folder = whole.model.source.weights() if is_checkpoint else None
        round_linears(model, whole, run, None if folder is None else open_checkpoint(folder))
    for parameter in trained:
        parameter.requires_grad_()
    if config.train.neftune_alpha:
        activate_neftune(model, config.train.neftune_alpha)
    for layer in structure.moe_layers:
        model.get_submodule(layer.experts).requires_grad_()
    refuse_unquantized(model, run)
    refuse_misplaced(model, device)
    checkpoint_layers(model, run, device)
    for layer in structure.moe_layers:
        if (name := run.router_biases.get(layer.index)) is not None:  # 16 bits would lose small updates
            path, _, key = name.rpartition(".")
            model.get_submodule(path).register_buffer(key, model.get_buffer(name).float())
    if dense is not None:
        dense.watch(model, structure.moe_layers)
    trained_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained_names <= run.parts.keys(), "something trains that the run does not know of"
    assert not ranks.is_single or len(trained_names) == len(run.parts), "something of the run does not train"
    if device.type == "cuda":
        leave_out_broken_packages(model, run.dtype)
        torch.cuda.empty_cache()  # free the cached memory that quantizing used
    if device.type != "meta":
        distribute(model, structure, ranks)
    adapted = Adapted(whole, model, ranks, context, None if run is whole else run)
    if device.type != "meta" and ranks.is_single:
        save_what_trains(model, adapted.learned(), ADAPTED)
        keep_as_built(model, run.dtype, [*adapted.trainable().values()])
        model.peft_config = NoAdapters()
    return adapted


def _context(run: ResolvedRun, ranks: Ranks, device: torch.device, dense: DenseWeights | None) -> ExpertContext:
    selection, dispatcher = run.selection, None
    if ranks.expert is not None and ranks.dense is not None:
        trained = {layer for kind in (selection.experts, selection.lora_experts) for layer, ids in kind.items() if ids}
        dispatcher = TokenDispatcher(ranks.placement.experts, trained, ranks.expert["ep"], ranks.dense["tp"])
    prefetcher = ExpertPrefetcher(device, run.carried_layers) if run.config.model.experts_on == "host" else None
    rounding = run.rounding
    split = run.model.gate_up_apart or (rounding is not None and not rounding.keep)
    return ExpertContext(run.expert_memory, run.keeps_rows, split, rounding, prefetcher, dispatcher, dense)


def build_noting(
    run: ResolvedRun,
    device: torch.device,
    on_read: Callable[[float], None] | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> tuple[Adapted, Base | None]:
    """Build the adapted model as `build` does; return it and the base of its frozen weights (None if random)."""
    with noting_base(run.model, ranks) as noted:
        return build(run, device, on_read, ranks), noted()
