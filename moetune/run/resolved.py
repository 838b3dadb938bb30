"""`ResolvedRun` and `ResolvedModel`: a run file together with the model it applies to, the input of every command.

The resolved run file itself (`ResolvedConfig`, values without torch) is in config/resolved.py.
"""

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import torch
from transformers import PretrainedConfig, PreTrainedModel

from moetune.config.memory_size import parse_size
from moetune.config.resolved import ResolvedConfig, ResolvedModelConfig
from moetune.config.schema import OptimizerConfig, Part
from moetune.errors import UserError
from moetune.models.routers import ScoreFunction
from moetune.models.selection import Selection
from moetune.models.source import ModelSource
from moetune.models.stack import decoder_layers, leave_out
from moetune.models.structure import ModelStructure
from moetune.run.dtypes import DTYPES, DeviceType
from moetune.run.keeps import NOTHING, Kept, kept_by_layer, section_of
from moetune.run.linears import linears_to_quantize
from moetune.run.loss_memory import LEAST, backward_bytes
from moetune.run.names import parts_by_name
from moetune.run.placement import EVERYTHING, Placement
from moetune.run.scores import Scores, refuse_other_base

_EXPERT_MEMORY: dict[DeviceType, str] = {"cuda": "256MiB", "cpu": "16MiB"}
"""Value of `train.expert_memory: auto` on each kind of device (docs/concepts/expert-bank.md).

On a GPU it holds a layer of small experts in a few kernel launches; on a CPU it fits the caches.
"""


@dataclass(frozen=True)
class ResolvedModel:
    """The model of a run: its source, its configuration, and the model itself on the meta device, without storage.

    Attributes:
        config: the `model:` section, without `auto`.
        source: the name of the model, where its weights are, and how the weights are stored there.
        settings: transformers' configuration, with the run's attention and dtype. Must not be modified.
        plain: the model on the meta device as transformers builds it, before any adaptation. Must not be modified.
        structure: parameters, linear layers and expert layers of `plain`.
    """

    config: ResolvedModelConfig
    source: ModelSource
    settings: PretrainedConfig = field(repr=False)
    plain: PreTrainedModel = field(repr=False)
    structure: ModelStructure = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of compute and of trained weights. Low-rank factors are always float32."""
        return DTYPES[self.config.dtype]

    @property
    def gate_up_apart(self) -> bool:
        """Whether each expert's gate and up projections stay quantized separately, as in the published checkpoint."""
        return self.source.quantization.keeps_gate_up_apart(self.config)

    def linears_to_quantize(self, selection: Selection) -> list[str]:
        """Return the paths of the frozen linear layers outside of experts that are stored in `model.base`, given what
        trains."""
        leaves_out = partial(self.source.quantization.leaves_out, config=self.config)
        return linears_to_quantize(self.plain, self.structure, selection, leaves_out)


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
        return parse_size(_EXPERT_MEMORY[self.device_type] if asked == "auto" else asked) or 0

    def loss_bytes(self, rows: int | None = None) -> int | None:
        """Return the bytes of logits that the loss may hold at once; None for no limit.

        `rows` is the number of rows of a micro-batch, on which `auto` depends; None for `train.micro_batch`.
        """
        train, layers = self.config.train, self.structure.moe_layers
        if train.loss_memory != "auto":
            return None if train.loss_memory == "none" else parse_size(train.loss_memory)
        if not layers or not self._trains_in_layers:
            return LEAST
        tokens = (rows or train.micro_batch) * train.sequence_length // self.config.parallel.tp
        last, width = layers[-1], self.dtype.itemsize
        chosen = (kind.get(last.index, ()) for kind in (self.selection.experts, self.selection.lora_experts))
        mixed = any(0 < len(ids) < last.shape.num_experts for ids in chosen)
        updates = any(one.fused_backward or one.offload for one in self.optimizers.values())
        # Experts of several kinds make smaller groups; trained ones are alone where gradients leave in backward.
        alone = mixed or (updates and last.index in self.selection.experts)
        needed = backward_bytes(
            last,
            tokens,
            width,
            at_once=0 if alone else self.expert_memory,
            experts=last.shape.num_experts // self.config.parallel.ep,
            dequantizes=len(self.selection.experts.get(last.index, ())) < last.shape.num_experts
            and DTYPES.get(self.config.model.base) != self.dtype,
            keeps=last.index in self.keeps_rows,
            recomputed="rest" not in self.keeps.get(last.index, NOTHING),
        )
        return max(LEAST, needed)

    @property
    def keeps_rows(self) -> frozenset[int]:
        """Indices of the layers that keep the outputs of gate_up for backward."""
        return frozenset(layer for layer, kept in self.keeps.items() if "rows" in kept)

    @property
    def _trains_in_layers(self) -> bool:
        """Whether anything in a decoder layer trains, so that gradients pass through layers."""
        chosen, linears = self.selection, self.structure.lora_layers()
        return (
            bool(chosen.experts or chosen.lora_experts)
            or any(linears[path].layer is not None for path in chosen.lora_linears)
            or any(part.layer is not None and part.name in chosen.full for part in self.structure.parameters)
        )

    @cached_property
    def quantized_linears(self) -> tuple[str, ...]:
        """Paths of the linear layers outside of experts that are stored in the precision `model.base`."""
        return tuple(self.model.linears_to_quantize(self.selection))

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

    def without_layers(self, layers: Collection[int]) -> "ResolvedRun":
        """Return a copy of the run, with a meta model of its own that skips the decoder layers with these indices."""
        structure, selection = self.structure.without(layers), self.selection.without(layers, self.structure)
        return replace(
            self,
            model=replace(self.model, plain=_without_layers(self.model.plain, frozenset(layers)), structure=structure),
            selection=selection,
            parts=parts_by_name(structure, selection),
            placement={layer: held for layer, held in self.placement.items() if layer not in layers},
        )

    def refuse_other_scores(self, base: str | None) -> None:
        """Raise `UserError` if experts were chosen by scores of other weights than `base`: the digest of the checkpoint
        (`Fingerprint.content`), None for random weights."""
        for where, scores in self.scored:
            refuse_other_base(scores, self.config.model.path, base, where)


_SHORTER: WeakKeyDictionary[PreTrainedModel, dict[frozenset[int], PreTrainedModel]] = WeakKeyDictionary()


def _without_layers(plain: PreTrainedModel, layers: frozenset[int]) -> PreTrainedModel:
    """Return a copy of a model that skips the decoder layers with these indices; equal calls return the same copy."""
    shorter = _SHORTER.setdefault(plain, {})
    if layers not in shorter:
        left_out = [layer for number, layer in enumerate(decoder_layers(plain).values()) if number in layers]
        model = copy.deepcopy(plain, {id(layer): layer for layer in left_out})  # these are not copied
        leave_out(model, layers)
        shorter[layers] = model
    return shorter[layers]


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one `UserError` with all distinct problems, one on each line; return if there are none."""
    if lines := dict.fromkeys(problems):
        raise UserError("\n".join(lines))
