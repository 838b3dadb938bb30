"""A resolved run becomes an adapted model: `build(run, device)`, the one path for training, counting and prediction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, set_seed
from transformers.integrations.neftune import activate_neftune
from transformers.utils import logging as transformers_logging

from moetune.adapt.attention import Capability, attention_for
from moetune.adapt.checkpointing import enable_checkpointing, keep_choices
from moetune.adapt.lora import add_lora
from moetune.adapt.norms import fuse_norms
from moetune.adapt.pack import (
    Fill,
    fill_bank,
    has_values,
    make_bank,
    make_expert_context,
    quantize_linear,
    refuse_misplaced,
    refuse_unquantized,
)
from moetune.adapt.weights import quantized_base
from moetune.adapt.weights.lazy_tensor import lazy_tensors
from moetune.adapt.weights.materialize import realize
from moetune.adapt.weights.quantized_base import is_quantized_base
from moetune.adapt.weights.quantizer import MoetuneConfig
from moetune.config.schema import Part
from moetune.documents import read_json
from moetune.errors import UserError, reading
from moetune.experts.context import ExpertContext
from moetune.experts.dense import DenseWeights
from moetune.models.hub.names import find_homes
from moetune.models.hub.quantized import open_checkpoint
from moetune.models.hub.snapshot import download
from moetune.models.hub.tensor_files import INDEX_FILE, SINGLE_FILE
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure
from moetune.parallel.distribute import distribute
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.dtypes import kind_of
from moetune.run.placement import Placement
from moetune.run.resolve import AnyRun, ResolvedModel, ResolvedRun, resolve

WEIGHTS = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are weights, when nothing says that they are quantized."""


@dataclass(frozen=True)
class Adapted:
    """A model ready to train: what trains requires a gradient, all else is frozen in base precision."""

    run: ResolvedRun
    model: PreTrainedModel
    ranks: Ranks = SINGLE_RANK
    expert_context: ExpertContext = field(default_factory=ExpertContext)

    @property
    def structure(self) -> ModelStructure:
        return self.run.structure

    @property
    def selection(self) -> Selection:
        return self.run.selection

    def part_of(self, name: str) -> Part:
        """Which part of the run file belongs to what is learned."""
        return "router" if name in self.run.router_biases.values() else self.run.parts[name]

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """Name -> parameter, of what trains: those that the optimizer updates, also while FSDP2 has gathered weights in
        their place."""
        return self._trainable

    @cached_property
    def _trainable(self) -> dict[str, nn.Parameter]:  # first asked for when the model is distributed
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def router_biases(self) -> dict[str, Tensor]:
        """Name -> the correction bias that is updated beside its router: float32 [E], the same on every rank."""
        here = {layer.index for layer in self.structure.moe_layers}
        names = (name for layer, name in self.run.router_biases.items() if layer in here)
        return {name: self.model.get_buffer(name) for name in names}

    def learned(self) -> dict[str, Tensor]:
        """Name -> tensor, of all that a run changes: what trains, and correction biases."""
        return {**self.trainable(), **self.router_biases()}

    def of_experts(self) -> list[nn.Parameter]:
        """What trains in expert banks."""
        banks = tuple(f"{layer.experts}." for layer in self.structure.moe_layers)
        return [p for name, p in self.trainable().items() if name.startswith(banks)]


def build(
    run: AnyRun,
    device: torch.device | str,
    on_read: Callable[[float], None] | None = None,
    ranks: Ranks = SINGLE_RANK,
    capability: Capability | None = None,
) -> Adapted:
    """Builds the adapted model on `device`, or the part of it that one of several ranks holds.

    On `meta` it has every parameter and buffer of the trained model and no storage: counting uses that. There it is not
    distributed yet (`distribute`).

    Args:
        on_read: is told, again and again, which share of a checkpoint has been read.
        ranks: the ranks of the run, as this one sees them.
        capability: on meta, of the GPU that the model stands for; None for a CPU.

    Raises:
        UserError: the weights cannot be read, or an expert that should be packed is not.
    """
    device = torch.device(device)
    run = resolve(run, kind_of(device))
    config, structure, selection = run.config, run.structure, run.selection
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    attention = attention_for(config, run.model.plain, device, capability)
    if not ranks.is_single:
        ranks = replace(ranks, placement=run.placed_at(ranks.coordinates.ep))
    dense = DenseWeights(run.router_scores) if config.train.dense_router_gradient else None
    context = make_expert_context(
        config.model,
        selection,
        ranks,
        device,
        keep_rows=config.train.checkpointing == "none",
        expert_memory=run.expert_memory,
        split_gate_up=run.model.gate_up_apart,
        dense=dense,
    )

    set_seed(config.train.seed)
    is_read = device.type != "meta" and config.model.weights == "pretrained"
    if is_read and not is_quantized_base(run.model.source.folder):
        packing = MoetuneConfig(
            config.model.base,
            config.model.double_quant,
            config.model.experts_on,
            selection,
            on_read,
            placement=ranks.placement,
            structure=structure,
            context=context,
        )
        model = load_pretrained(run.model, packing, device)
        model.config._attn_implementation = attention
    else:
        model = copy.deepcopy(run.model.plain)
        model.config._attn_implementation = attention
        if is_read:
            quantized_base.read(model, run, device, on_read, ranks, context)
        else:
            fill = has_values if device.type == "meta" else partial(realize, model, device=device)
            _pack(model, run, device, fill, ranks.placement, context)
    model.requires_grad_(False)
    model.to(device)  # type: ignore[arg-type]  # its signature is that of the function it wraps
    fuse_norms(model)

    trained = [parameter for name, parameter in model.named_parameters() if name in selection.full]
    assert len(trained) == len(selection.full), "a selected parameter is not in the built model"
    if selection.lora is not None and selection.lora_linears:
        add_lora(model, selection.lora_linears, selection.lora)  # PEFT freezes all but its own factors
    for parameter in trained:
        parameter.requires_grad_()
    if config.train.neftune_alpha:
        activate_neftune(model, config.train.neftune_alpha)
    for layer in structure.moe_layers:
        model.get_submodule(layer.experts).requires_grad_()
    refuse_unquantized(model, run)
    refuse_misplaced(model, config.model, device)
    if config.train.checkpointing in ("full", "offload"):
        enable_checkpointing(model, offload_to=device if config.train.checkpointing == "offload" else None)
    else:
        keep_choices(model)
    for layer in structure.moe_layers:
        if (name := run.router_biases.get(layer.index)) is not None:  # 16 bits would round its updates away
            path, _, key = name.rpartition(".")
            model.get_submodule(path).register_buffer(key, model.get_buffer(name).float())
    if dense is not None:
        dense.watch(model, structure.moe_layers)
    trained_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained_names <= run.parts.keys(), "something trains that the run does not know of"
    assert not ranks.is_single or len(trained_names) == len(run.parts), "something of the run does not train"
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what packing took
    if device.type != "meta":
        distribute(model, structure, ranks)
    return Adapted(run, model, ranks, context)


def _pack(
    model: PreTrainedModel,
    run: ResolvedRun,
    device: torch.device,
    fill: Fill,
    placement: Placement,
    context: ExpertContext,
) -> None:
    """Packs what is to be packed and gives the rest its values, module by module.

    All banks are there first, as where a checkpoint is read: what is on its way comes behind them and leaves no holes.
    """
    banks = []
    for layer in run.structure.moe_layers:
        experts = model.get_submodule(layer.experts)
        banks.append(make_bank(experts, layer, run.selection, run.config.model, run.dtype, device, placement, context))
    for layer, bank in zip(run.structure.moe_layers, banks, strict=True):
        fill_bank(model, layer, bank, fill)
    for path in run.quantized_linears:
        quantize_linear(model, path, run.config.model, run.dtype, device, fill)
    embedding = model.get_input_embeddings()
    for path, module in list(model.named_modules()):
        fill(path)
        if module is embedding:
            model.tie_weights()  # a head that is this table is not drawn for itself


def load_pretrained(model: ResolvedModel, packing: MoetuneConfig, device: torch.device) -> PreTrainedModel:
    """Reads a checkpoint, packing what is to be packed as it comes (quantizer.py)."""
    folder = checked_folder(model)
    tensors = lazy_tensors(model, packing.selection, folder, device) if model.published.method else None
    built = from_pretrained(
        type(model.plain),
        model,
        folder,
        tensors,
        config=model.settings,
        dtype=model.dtype,
        quantization_config=packing,
        device_map={"": device},
    )
    if tensors is not None and (folder / "generation_config.json").is_file():  # transformers was given no folder
        with reading(repr(str(folder / "generation_config.json"))):
            built.generation_config = GenerationConfig.from_pretrained(str(folder))
    built.hf_quantizer.remove_quantization_config(built)  # to other trainers it is a model like any other
    return built


def checked_folder(model: ResolvedModel) -> Path:
    """The folder of a model's weights, whose headers fit the model: what is wrong is known before any is read.

    Raises:
        UserError: they cannot be had, an index cannot be used, or a weight is no floating-point number.
    """
    source = model.source
    if source.folder is None:
        raise UserError(f"model {source.name!r} has no weights to load; use model.weights=random")
    folder = Path(source.folder) if Path(source.folder).is_dir() else download(source.folder)
    stored = open_checkpoint(folder)
    index = folder / INDEX_FILE
    indexed = not (folder / SINGLE_FILE).is_file()
    if indexed and not isinstance(read_json(index, dict[str, Any]).get("metadata"), dict):  # transformers writes there
        raise UserError(f'{str(index)!r} has no metadata; add "metadata": {{}} to it')
    state, homes = model.plain.state_dict(), find_homes(model.plain, stored)
    wrong = []
    for name, home in homes.items():
        if (there := state.get(name)) is None:
            continue
        keys = home.every_key()
        if there.is_floating_point():
            wrong += [f"{k} is of type {stored[k].dtype}, no weight" for k in keys if stored[k].dtype not in WEIGHTS]
        # Each expert's tensors are checked when they are read.
        if len(keys) == 1 and (found := stored[keys[0]]).numel != there.numel():
            wrong.append(f"{name} is {[*found.shape]}, not {[*there.shape]}")
    refuse_misfit(wrong, f"the weights in {source.folder!r}", source.name)
    described, held = (
        sum(part.numel for part in model.structure.parameters),
        sum(tensor.numel for tensor in stored.values()),
    )
    if described > 2 * held:
        raise UserError(
            f"the weights in {source.folder!r} do not fit {source.name!r}: config.json describes {described:,} "
            f"parameters, and there are {held:,}"
        )
    return folder


def from_pretrained(kind: Any, model: ResolvedModel, folder: Path, state_dict: Any = None, **how: Any) -> Any:
    """A model as transformers loads it, from tensors or a folder that was checked; every tensor has its place, and
    every place a tensor.

    Raises:
        UserError: it cannot be loaded, or one has not.
    """
    with reading(f"the weights of {model.source.name!r} in {str(folder)!r}"), no_progress_bars():
        built, info = kind.from_pretrained(
            str(folder) if state_dict is None else None,
            state_dict=state_dict,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **how,
        )
    wrong = [f"{kind} {key}" for kind in ("missing", "unexpected") for key in sorted(info[f"{kind}_keys"])]
    wrong += [f"{key} is {[*found]}, not {[*size]}" for key, found, size in sorted(info["mismatched_keys"])]
    refuse_misfit(wrong, f"the weights in {model.source.folder!r}", model.source.name)
    return built


def refuse_misfit(wrong: Collection[str], what: str, model: str) -> None:
    """Raise `UserError` naming what of some tensors does not fit a model, if anything does not."""
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise UserError(f"{what} do not fit {model!r}: {'; '.join([*wrong][:10])}{more}")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without those of transformers; ours shows the same."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()
