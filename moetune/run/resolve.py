"""A run file on a model, for a kind of device: resolved once, and given to everything that works on it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from moetune.config.load import load_run_config
from moetune.config.schema import ModelConfig, OptimizerConfig, Part, RunConfig
from moetune.config.sizes import parse_size
from moetune.errors import UserError
from moetune.files import expanded
from moetune.models.routers import Score, correction_bias, known_scores
from moetune.models.selection import NOTHING, Selection, examine_selection
from moetune.models.source import ModelSource, find_model_source
from moetune.models.stack import leave_out
from moetune.models.structure import ModelStructure, meta_model, read_structure
from moetune.run import validation
from moetune.run.choice import scores_of, settle
from moetune.run.deepspeed_json import deepspeed_json
from moetune.run.dtypes import DTYPES, DeviceType, dtype_on, this_device
from moetune.run.linears import linears_to_quantize
from moetune.run.names import parts_of
from moetune.run.placement import EVERYTHING, Placement, balance_experts
from moetune.run.records import read_load
from moetune.run.scores import Scores, refuse_other_base

_EXPERT_MEMORY: dict[DeviceType, str] = {"cuda": "256MiB", "cpu": "16MiB"}
"""What `train.expert_memory: auto` is: on a GPU a few launches for a layer of small experts, on a CPU what its caches
do not lose (docs/concepts/expert-bank.md)."""


@dataclass(frozen=True)
class ResolvedModel:
    """The model of a run: found, configured, built without storage, and read.

    Attributes:
        config: the `model:` block, `dtype` and `base` spelled out.
        source: what it is called, where its weights are, and how they are stored there.
        settings: transformers' configuration with the run's attention and dtype. Not to be changed.
        plain: the model on the meta device as transformers has it, before any adaptation. Not to be changed.
        structure: its parts.
    """

    config: ModelConfig
    source: ModelSource
    settings: PretrainedConfig = field(repr=False)
    plain: PreTrainedModel = field(repr=False)
    structure: ModelStructure = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of compute, and of what trains except low-rank factors, which are float32."""
        return DTYPES[self.config.dtype]

    @property
    def gate_up_apart(self) -> bool:
        """Whether an expert's gate and up are quantized each by itself: they are kept as they are published."""
        return self.source.quantization.keeps_gate_up_apart(self.config)


@dataclass(frozen=True)
class ResolvedRun:
    """What a run file comes to on its model.

    Attributes:
        config: the run file with `model.dtype`, `model.base` and the experts that are chosen from scores spelled out.
        device_type: what it is resolved for.
        model: what it begins with.
        selection: what trains.
        parts: name in the adapted model -> part, of every parameter that trains, on all ranks together.
        optimizers: of the parts that train.
        placement: layer index -> for each of the `ep` ranks the ids of its experts; empty where they are not spread.
        router_scores: layer index -> the function of its router's logits, under `train.dense_router_gradient`.
        router_biases: layer index -> the buffer that `train.router_bias_rate` updates.
        scored: the scores that experts were chosen by, each with the key that names them.
        problems: why it can be neither predicted nor trained; empty for what `resolve` returns.
    """

    config: RunConfig
    device_type: DeviceType
    model: ResolvedModel
    selection: Selection
    parts: Mapping[str, Part] = field(repr=False)
    optimizers: Mapping[Part, OptimizerConfig]
    placement: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    router_scores: Mapping[int, Score] = field(default_factory=dict)
    router_biases: Mapping[int, str] = field(default_factory=dict)
    scored: tuple[tuple[str, Scores], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def structure(self) -> ModelStructure:
        return self.model.structure

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def expert_memory(self) -> int:
        """What the unpacked matrices of experts that are worked on together may take, in bytes."""
        asked = self.config.train.expert_memory
        return parse_size(_EXPERT_MEMORY[self.device_type] if asked == "auto" else asked) or 0

    @cached_property
    def quantized_linears(self) -> tuple[str, ...]:
        """Paths of the linear layers that are stored in base precision."""
        return tuple(linears_to_quantize(self.model.plain, self.structure, self.selection))

    def device(self, device: torch.device | str | None = None) -> torch.device:
        """Where it can take place on this machine: on `device`, or on the first one of the kind that it is for.

        Raises:
            UserError: that is of another kind, or there is none.
        """
        chosen = torch.device(device or self.device_type)
        if chosen.type != self.device_type:
            raise UserError(f"the run is resolved for {self.device_type}; resolve it for {chosen.type}")
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise UserError("the run is resolved for a GPU, and this machine has none; resolve it for cpu")
        return chosen

    def placed_at(self, ep: int) -> Placement:
        """The experts of one of the `ep` ranks."""
        return Placement(ep, self.placement) if self.placement else EVERYTHING

    def with_random_weights(self) -> ResolvedRun:
        """The same run on weights that are drawn."""
        model = self.config.model.model_copy(update={"weights": "random"})
        config = self.config.model_copy(update={"model": model})
        return replace(self, config=config, model=replace(self.model, config=model))

    def without_layers(self, layers: Collection[int]) -> ResolvedRun:
        """The same run on a model that passes these decoder layers by, for a prediction."""
        structure, selection = self.structure.without(layers), self.selection.without(layers, self.structure)
        plain = copy.deepcopy(self.model.plain)
        leave_out(plain, layers)
        return replace(
            self,
            model=replace(self.model, plain=plain, structure=structure),
            selection=selection,
            parts=parts_of(structure, selection),
            placement={layer: held for layer, held in self.placement.items() if layer not in layers},
        )

    def refuse_other_scores(self, base: str | None) -> None:
        """Raise `UserError` if experts were chosen by scores of another checkpoint than that of this digest."""
        for where, scores in self.scored:
            refuse_other_base(scores, self.config.model.path, base, where)

    def refuse_unpredictable(self) -> None:
        """Raises `UserError` if it can be trained at best."""
        raise_problems(validation.of_prediction(self.config))


def resolve(config: RunConfig, device_type: DeviceType = "cuda", *, like: ResolvedRun | None = None) -> ResolvedRun:
    """Resolves a run file; no weights, no data and, for catalog names and folders, no network.

    Args:
        device_type: what the run is for, which `dtype: auto` depends on; a prediction is for a GPU wherever it is made.
        like: a run whose model is taken over if it is the same one.

    Raises:
        UserError: the model cannot be found or read; or everything that the run file asks for and cannot have, one line
            a problem.
    """
    run = examine(config, device_type, like=like)
    raise_problems(run.problems)
    return run


def examine(config: RunConfig, device_type: DeviceType = "cuda", *, like: ResolvedRun | None = None) -> ResolvedRun:
    """As `resolve`, and problems of the run file are left to be reported with others'.

    Raises:
        UserError: the model cannot be found or read.
    """
    config = config.model_copy(update={"model": _with_dtype(config.model, device_type)})
    model, problems = _examine_model(config.model, None if like is None else like.model)
    config = config.model_copy(update={"model": model.config})
    structure, plain, parallel = model.structure, model.plain, config.parallel
    scored: tuple[tuple[str, Scores], ...] = ()
    try:
        settled = settle(config.adapt, structure)
        scored = scores_of(config.adapt)
        config = config.model_copy(update={"adapt": settled})
        selection, wrong = examine_selection(config.adapt, structure, validation.inert_linears(plain, structure))
    except UserError as error:
        selection, wrong = NOTHING, [str(error)]
    if config.train.router_aux_loss == "auto":
        coefficient = getattr(model.settings.get_text_config(), "router_aux_loss_coef", None)
        problems += [] if coefficient else validation.of_auto_coefficient(structure.model_type)
        train = config.train.model_copy(update={"router_aux_loss": coefficient or 0.0})
        config = config.model_copy(update={"train": train})
    parts = parts_of(structure, selection)
    trains = frozenset(parts.values())
    optimizers = {part: optimizer for part, optimizer in config.optimizers.items() if part in trains}
    problems += wrong
    if not wrong:
        problems += validation.of_parts(config, trains)
    kv_heads = getattr(model.settings.get_text_config(), "num_key_value_heads", None)
    experts = [layer.shape.num_experts for layer in structure.moe_layers]
    indivisible = [*validation.of_division(parallel, layers=structure.num_layers, experts=experts, kv_heads=kv_heads)]
    problems += [
        *validation.of_experts(plain, structure),
        *validation.of_lora(plain, selection),
        *validation.of_router_losses(config, structure),
        *validation.of_checkpointing(config, plain),
        *validation.of_float16(plain, parts, optimizers),
        *validation.of_unshared(config),
        *indivisible,
        *validation.of_split_attention(config, plain, structure, selection),
    ]
    placement: Mapping[int, tuple[tuple[int, ...], ...]] = {}
    try:
        if parallel.engine == "deepspeed":
            deepspeed_json(config)
        if parallel.ep > 1 and not indivisible:
            load = None if parallel.load is None else read_load(expanded(parallel.load), "parallel.load")
            placement = balance_experts(structure, selection, parallel.ep, load)
    except UserError as error:
        problems.append(str(error))
    router_scores: dict[int, Score] = {}
    if config.train.dense_router_gradient:
        router_scores = known_scores(plain, structure.moe_layers)
        problems += validation.of_dense_gradient(config, structure, trains, router_scores)
    router_biases: dict[int, str] = {}
    if config.train.router_bias_rate:
        routers = {part.layer for part in structure.parts_of("router") if part.name in selection.full}
        found = {x.index: correction_bias(plain, x) for x in structure.moe_layers if x.index in routers}
        router_biases = {layer: name for layer, name in found.items() if name is not None}
        problems += validation.of_router_bias(structure.model_type, routers, router_biases)
    return ResolvedRun(
        config,
        device_type,
        model,
        selection,
        parts,
        optimizers,
        placement,
        router_scores,
        router_biases,
        scored,
        tuple(dict.fromkeys(problems)),
    )


def examined(run: ResolvedRun | RunConfig | Path | str, device: torch.device | str | None = None) -> ResolvedRun:
    """A run, whether it is resolved, a run file's values, or a run file, as `examine` gives it for a device; by default
    for what this machine has.

    Raises:
        UserError: as `load_run_config` and `examine`.
    """
    if isinstance(run, ResolvedRun):
        return run
    config = run if isinstance(run, RunConfig) else load_run_config(run)
    kind = this_device() if device is None else "cpu" if torch.device(device).type == "cpu" else "cuda"
    return examine(config, kind)


def resolve_model(config: ModelConfig, device_type: DeviceType = "cuda") -> ResolvedModel:
    """The model of a `model:` block, without a run.

    Raises:
        UserError: it cannot be found or read, or is not as the block says.
    """
    model, problems = _examine_model(_with_dtype(config, device_type), None)
    raise_problems(problems)
    return model


def raise_problems(problems: Iterable[str]) -> None:
    """Raises `UserError` with all of them, each once, if there are any."""
    lines = dict.fromkeys(problems)
    if lines:
        raise UserError("\n".join(lines))


def _with_dtype(config: ModelConfig, device_type: DeviceType) -> ModelConfig:
    return config.model_copy(update={"dtype": dtype_on(device_type)}) if config.dtype == "auto" else config


def _examine_model(config: ModelConfig, like: ResolvedModel | None) -> tuple[ResolvedModel, list[str]]:
    known = like if like is not None and _builds_alike(config, like.config) else None
    source = find_model_source(config.path) if known is None else known.source
    no_attention = [*validation.of_attention(source.config, config.attention)]
    problems = [*validation.of_published(source.quantization, config), *no_attention]
    config = source.quantization.settle(config)
    problems += validation.of_dtypes(config)
    if known is not None:
        return replace(known, config=config), problems
    settings = copy.deepcopy(source.config)
    if getattr(settings, "quantization_config", None) is not None:
        del settings.quantization_config
    # transformers makes no model for flash attention where its package is missing; `build` says which attention runs.
    plain_attention = "sdpa" if config.attention == "flash_attention_2" else config.attention
    settings._attn_implementation = "eager" if no_attention else plain_attention
    settings.use_cache = False
    settings.dtype = DTYPES[config.dtype]
    plain = meta_model(settings)
    return ResolvedModel(config, source, settings, plain, read_structure(plain)), problems


def _builds_alike(one: ModelConfig, other: ModelConfig) -> bool:
    return all(getattr(one, key) == getattr(other, key) for key in ("path", "dtype", "attention"))
