"""`ResolvedRun` and `ResolvedModel`: a run file with its model, the input of every command.

The resolved run file itself (`ResolvedConfig`, values without torch) is in config/resolved.py.
"""

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from moetune.config.memory_size import parse_size
from moetune.config.resolved import ResolvedConfig, ResolvedModelConfig
from moetune.config.schema import OptimizerConfig, Part, Storage, TrainConfig
from moetune.errors import UserError
from moetune.formats.rounding import Rounding, rounding_into
from moetune.formats.table import format_of
from moetune.models.hub.key_mapping import published_paths
from moetune.models.routers import ScoreFunction
from moetune.models.selection import Selection
from moetune.models.source import ModelSource
from moetune.models.stack import AbsentTable, every_layer, leave_out
from moetune.models.structure import ModelStructure
from moetune.run.dtypes import DTYPES, DeviceType
from moetune.run.keeps import NOTHING, Kept, is_open, kept_by_layer, recomputes_layers, section_of
from moetune.run.linears import linears_to_quantize, tables
from moetune.run.names import parts_by_name
from moetune.run.placement import EVERYTHING, Placement
from moetune.run.scores import Scores
from moetune.run.stages import stages_of

LEAST_EXPERT_MEMORY: dict[DeviceType, str] = {"cuda": "256MiB", "cpu": "16MiB"}
"""The least that `train.expert_memory: auto` stands for on each kind of device (docs/concepts/expert-bank.md).

On a GPU it holds a layer of small experts in a few kernel launches, and is more where memory is left
(planning/settle.py); on a CPU it fits the caches.
"""
LEAST_LOSS_MEMORY = 256 << 20
"""Least bytes of logits under `train.loss_memory: auto`, which are computed in a matrix product of full speed."""


@dataclass(frozen=True)
class ResolvedModel:
    """The model of a run: its source, its configuration, and the model itself on the meta device, without storage.

    Attributes:
        config: the `model:` section, without `auto`.
        source: the name of the model, where its weights are, and how the weights are stored there.
        settings: transformers' configuration, with the run's attention and dtype. Must not be modified.
        plain: the model on the meta device as transformers builds it, before any adaptation. Must not be modified.
        structure: parameters, linear layers and expert layers of `plain`.
        is_looped: whether decoder layers run more than once in a forward pass.
    """

    config: ResolvedModelConfig
    source: ModelSource
    settings: PretrainedConfig = field(repr=False)
    plain: PreTrainedModel = field(repr=False)
    structure: ModelStructure = field(repr=False)
    is_looped: bool

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of compute and of trained weights; that of low-rank factors is `adapt.lora.dtype`."""
        return DTYPES[self.config.dtype]

    @property
    def lost_bits(self) -> str | None:
        """A sentence for the user if the values of the checkpoint lose bits in the dtype of compute."""
        if (self.source.config.dtype, self.dtype) != (torch.float16, torch.bfloat16):
            return None
        return (
            "the checkpoint is in float16 and computed in bfloat16, so what is not quantized is rounded to 8 bits from "
            "11; model.dtype: fp16 in a run file does not"
        )

    @property
    def gate_up_apart(self) -> bool:
        """Whether each expert's gate and up projections stay quantized separately, as in the published checkpoint."""
        return self.source.quantization.keeps_gate_up_apart(self.config)

    def linears_to_quantize(self, selection: Selection) -> dict[str, Storage]:
        """Return path -> storage of the frozen linear layers outside of experts that are stored in `model.base`, given
        what trains."""
        leaves_out, paths = self.source.quantization.leaves_out, self.published_paths
        stored = linears_to_quantize(self.plain, self.structure, selection, self.config)
        return {path: storage for path, storage in stored.items() if not leaves_out(storage, *paths.get(path, [path]))}

    @property
    def published_paths(self) -> Mapping[str, list[str]]:
        """Path of a linear layer, or of a layer's experts -> its paths in published checkpoints; empty if the published
        format is that of all modules."""
        quantization, structure = self.source.quantization, self.structure
        if not (quantization.left_out or quantization.only):
            return {}
        return published_paths(self.plain, (*structure.linears(),), tuple(x.experts for x in structure.moe_layers))


@dataclass(frozen=True)
class ResolvedRun:
    """A run file resolved on its model, for one kind of device: what prediction, training and export work on.

    Attributes:
        config: the run file with the values that depend on the model filled in (config/resolved.py).
        device_type: the kind of device that `model.dtype: auto` was resolved for.
        selection: which parameters and experts train, and which layers get LoRA.
        parts: name of each trained parameter in the adapted model -> its part, over all ranks together.
        optimizers: part that trains -> its optimizer settings.
        placement: layer index -> expert ids of each of the `parallel.ep` ranks; empty if experts are not divided.
        router_scores: layer index -> how routing weights follow from logits, by softmax or sigmoid; filled only with
            `train.dense_router_gradient`.
        router_biases: layer index -> name of the correction bias to update; filled only with `train.router_bias_rate`.
        keeps: decoder layer -> what it keeps for backward beside its input (`train.checkpointing`, `train.keep_rows`);
            layers that keep nothing are left out.
        scored: (key of the run file, scores) for each choice of experts by scores.
        problems: one line for each reason why the run can be neither predicted nor trained. Empty if `resolve` made it.
    """

    config: ResolvedConfig
    device_type: DeviceType
    model: ResolvedModel
    selection: Selection
    parts: Mapping[str, Part] = field(repr=False)
    optimizers: Mapping[Part, OptimizerConfig]
    placement: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    router_scores: Mapping[int, ScoreFunction] = field(default_factory=dict)
    router_biases: Mapping[int, str] = field(default_factory=dict)
    keeps: Mapping[int, Kept] = field(default_factory=dict)
    scored: tuple[tuple[str, Scores], ...] = ()
    problems: tuple[str, ...] = ()
    _carried: frozenset[int] | None = None  # `carried_layers` before layers were left out

    @property
    def structure(self) -> ModelStructure:
        """Structure of the plain model."""
        return self.model.structure

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of compute and of trained weights, except low-rank factors."""
        return self.model.dtype

    @property
    def trains(self) -> frozenset[Part]:
        """The parts with at least one trained parameter."""
        return frozenset(self.parts.values())

    @property
    def expert_memory(self) -> int:
        """Bytes that the dequantized matrices of experts computed together may take; 0 for one expert at a time."""
        asked = self.config.train.expert_memory
        return parse_size(LEAST_EXPERT_MEMORY[self.device_type] if asked == "auto" else asked) or 0

    @property
    def loss_memory(self) -> int | None:
        """Bytes of logits that the loss may hold at once; None for no limit.

        `auto` is `expert_memory`: at the loss, as in the backward pass of the last layer's experts, all saved
        activations are alive, so that a loss within these bytes does not raise the peak of a step.
        """
        asked = self.config.train.loss_memory
        if asked == "auto":
            return max(LEAST_LOSS_MEMORY, self.expert_memory)
        return None if asked == "none" else parse_size(asked)

    @property
    def layer_by_layer(self) -> bool:
        """Whether a step's micro-batches run layer by layer; not with `auto` until the GPU is known."""
        return self.config.train.layer_by_layer is True

    @property
    def keeps_rows(self) -> frozenset[int]:
        """Indices of the layers that keep the outputs of gate_up for backward."""
        return frozenset(layer for layer, kept in self.keeps.items() if "rows" in kept)

    @cached_property
    def carried_layers(self) -> frozenset[int]:
        """Indices of the layers whose experts, copied from the host, stay on the GPU from one backward pass to the next
        forward pass.

        They are the first layers, as many as take, with all gradients, no more than the inputs that the layers after
        them keep on the GPU: these are freed before the experts arrive, so that the peak is as without. Empty unless
        layers are recomputed.
        """
        train, model = self.config.train, self.config.model
        if self._carried is not None:
            return self._carried
        if model.experts_on != "host" or not recomputes_layers(train):
            return frozenset()
        tokens = train.micro_batch * train.sequence_length * (train.accumulate if self.layer_by_layer else 1)
        carried = set[int]()
        taken = 4.0 * self._trained_parameters()  # bytes of gradients, and of these layers' experts
        for layer in self.structure.moe_layers:
            storage, shape = format_of(model.storage_of("experts", layer.index), model.double_quant), layer.shape
            taken += shape.num_experts * shape.parameters_per_expert * storage.bits / 8
            after = range(layer.index + 1, self.structure.num_layers)
            inputs = sum(not {"host", "rest"} & self.keeps.get(number, NOTHING) for number in after)
            if taken > inputs * tokens * shape.hidden * self.dtype.itemsize:
                break
            carried.add(layer.index)
        return frozenset(carried)

    def _trained_parameters(self) -> int:
        selection, structure = self.selection, self.structure
        linears = structure.lora_layers()
        trained = sum(parameter.numel for parameter in structure.parameters if parameter.name in selection.full)
        for path in selection.lora_linears:
            trained += selection.ranks[path] * (linears[path].in_features + linears[path].out_features)
        for layer in structure.moe_layers:
            trained += sum(selection.trained_parameters(layer).values())
            if layer.index in selection.lora_experts and selection.lora and selection.lora.share == "outer":
                trained += 2 * selection.ranks[layer.experts] * layer.shape.hidden
        return trained

    @property
    def rounding(self) -> Rounding | None:
        """How merged weights are rounded in forward (`train.merge_into`); None without it."""
        into = self.config.train.merge_into
        return None if into is None else rounding_into(into, self.model.source.quantization.base)

    @cached_property
    def quantized_linears(self) -> Mapping[str, Storage]:
        """Path -> storage of the linear layers outside of experts that are stored in `model.base`."""
        return self.model.linears_to_quantize(self.selection)

    @cached_property
    def tables_on_host(self) -> list[str]:
        """Paths of the embeddings whose tables are in host memory (`model.embeddings_on`)."""
        if self.config.model.embeddings_on == "gpu":
            return []
        return [path for path, why in tables(self.model.plain, self.selection).items() if why is None]

    def device(self, device: torch.device | str | None = None) -> torch.device:
        """Return the device to run on; by default the first of the kind that the run was resolved for.

        Raises:
            UserError: `device` is of another kind, or this machine has no GPU.
        """
        chosen = torch.device(device or self.device_type)
        if chosen.type != self.device_type:
            raise UserError(f"the run is resolved for {self.device_type}; resolve it for {chosen.type}")
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise UserError("the run is resolved for a GPU, and this machine has none; resolve it for cpu")
        return chosen

    def placed_at(self, ep: int) -> Placement:
        """Return which experts are on the rank with the index `ep` along the axis ep; all if they are not divided."""
        return Placement(ep, self.placement) if self.placement else EVERYTHING

    def with_random_weights(self) -> "ResolvedRun":
        """Return a copy of the run with `model.weights: random`. The model is shared, not copied."""
        config = self.config.but(model={"weights": "random"})
        return replace(self, config=config, model=replace(self.model, config=config.model))

    def keeping(self, keeps: Mapping[int, Kept]) -> "ResolvedRun":
        """Return a copy of the run with `keeps`, decoder layer -> what it saves for backward, in place of `auto`.

        The layers are written into `train.checkpointing`. With `train.keep_rows: auto`, only the number of layers that
        keep rows is used: it is written into `keep_rows`, and as many of the last layers with experts keep rows.
        """
        if self.config.train.keep_rows == "auto":
            rows = sum("rows" in kept for kept in keeps.values())
            config = self.config.but(train={"keep_rows": rows or "none"})
        else:
            config = self.config.but(train={"checkpointing": section_of(keeps)})
        return replace(self, config=config, keeps=kept_by_layer(config.train, self.structure))

    def but(self, **sections: Mapping[str, Any]) -> "ResolvedRun":
        """Return a copy of the run with other values of some keys, on which nothing but `config` depends."""
        return replace(self, config=self.config.but(**sections))

    def settled_as(self, before: TrainConfig | None) -> "ResolvedRun":
        """Return a copy of the run with the values of `before` in place of `auto` in `train.checkpointing`,
        `train.keep_rows`, `train.layer_by_layer` and `train.expert_memory`; for None with those that take least."""
        run, train = self, self.config.train
        if train.layer_by_layer == "auto":
            run = run.but(train={"layer_by_layer": before is not None and before.layer_by_layer is True})
        if before is not None and train.expert_memory == "auto":
            run = run.but(train={"expert_memory": before.expert_memory})
        least = run.keeps if before is None else kept_by_layer(before, run.structure)
        return run.keeping(least) if is_open(train) else run

    def without_layers(self, layers: Collection[int]) -> "ResolvedRun":
        """Return a copy of the run, with a meta model of its own that skips the decoder layers with these indices."""
        structure = self.structure.without(layers)
        selection = self.selection.within(structure)
        left_out = [layer for number, layer in enumerate(every_layer(self.model.plain).values()) if number in layers]
        plain = copy.deepcopy(self.model.plain, {id(layer): layer for layer in left_out})  # these are not copied
        leave_out(plain, layers)
        return replace(
            self,
            model=replace(self.model, plain=plain, structure=structure),
            selection=selection,
            parts=parts_by_name(structure, selection),
            placement={layer: held for layer, held in self.placement.items() if layer not in layers},
            _carried=self.carried_layers,
        )

    @cached_property
    def embedding(self) -> str:
        """Name of the weight of the input embedding."""
        weight = self.model.plain.get_input_embeddings().weight
        return next(name for name, parameter in self.model.plain.named_parameters() if parameter is weight)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The decoder layers of each stage of the pipeline; one stage with all layers without `parallel.pp`."""
        return stages_of(self.config.parallel, self.structure.num_layers)

    def cut_into(self, stages: Iterable[range]) -> "ResolvedRun":
        """Return a copy of the run with these stages of the pipeline, in place of `parallel.stages: auto`."""
        pairs = tuple((stage.start, stage.stop - 1) for stage in stages)
        return self.but(parallel={"stages": pairs})

    def held_layers(self, pp: int) -> dict[int, int]:
        """Return decoder layer -> stage, for the layers of the rank with the index `pp` on the axis pp, in order; all
        layers without `parallel.pp`."""
        if self.config.parallel.pp == 1:
            return dict.fromkeys(range(len(every_layer(self.model.plain))), 0)
        numbers = range(pp, len(self.stages), self.config.parallel.pp)
        return {layer: number for number in numbers for layer in self.stages[number]}

    @property
    def trains_before_stages(self) -> tuple[bool, ...]:
        """For each stage of the pipeline, whether anything trains before its first layer."""
        paths = [self.embedding.removesuffix("weight"), *(f"{path}." for path in every_layer(self.model.plain))]
        trains = [any(name.startswith(path) for name in self.parts) for path in paths]
        return tuple(any(trains[: stage.start + 1]) for stage in self.stages)

    def held_at(self, pp: int) -> "ResolvedRun":
        """Return a copy of the run with only what the rank with the index `pp` on the axis pp holds; the run itself
        without `parallel.pp`."""
        ranks = self.config.parallel.pp
        if ranks == 1:
            return self
        run = self.without_layers({*range(self.structure.num_layers)} - self.held_layers(pp).keys())
        plain, tied = run.model.plain, self.structure.tied
        head = next(path for path, module in plain.named_modules() if module is plain.get_output_embeddings())
        is_last = pp == (len(self.stages) - 1) % ranks

        def has(name: str) -> bool:  # a tied embedding is on the first and on the last rank, all else on the last
            return pp == 0 or (is_last and name in tied.values()) if name == self.embedding else is_last

        # the head of a tied embedding is the same tensor
        absent = [name for name in (self.embedding, f"{head}.weight") if not has(tied.get(name, name))]
        for path in (name.removesuffix(".weight") for name in absent):
            plain.set_submodule(path, AbsentTable(plain.get_submodule(path)))
        if len(absent) == 2:
            plain.all_tied_weights_keys = {}
        structure = run.structure.where(lambda name, layer: layer is not None or has(name))
        selection = run.selection.within(structure)
        model = replace(run.model, structure=structure)
        return replace(run, model=model, selection=selection, parts=parts_by_name(structure, selection))

    def refuse_other_scores(self, base: str | None) -> None:
        """Raise `UserError` if experts were chosen by scores of other weights than `base`: the digest of the checkpoint
        (`Fingerprint.content`), None for random weights."""
        model = self.config.model.path
        for where, scores in self.scored:
            if scores.base != base:
                theirs, ours = (f"base {digest[:12]}" if digest else "random weights" for digest in (scores.base, base))
                raise UserError(
                    f"{where}: the scores are of {scores.model!r} ({theirs}), and model.path is {model!r} ({ours}); "
                    "record them again with moetune score"
                )
