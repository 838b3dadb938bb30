"""A run file resolved on its model: the one value that prediction, training and export work on."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from transformers import PretrainedConfig, PreTrainedModel

from moetune.config.schema import OptimizerConfig, Part, ResolvedConfig, ResolvedModelConfig
from moetune.config.sizes import parse_size
from moetune.errors import UserError
from moetune.models.routers import Score
from moetune.models.selection import Selection
from moetune.models.source import ModelSource
from moetune.models.stack import leave_out
from moetune.models.structure import ModelStructure
from moetune.run.dtypes import DTYPES, DeviceType
from moetune.run.linears import linears_to_quantize
from moetune.run.names import parts_by_name
from moetune.run.placement import EVERYTHING, Placement
from moetune.run.scores import Scores, refuse_other_base
from moetune.run.source_quantization import SourceQuantization, keeps_gate_up_apart

_EXPERT_MEMORY: dict[DeviceType, str] = {"cuda": "256MiB", "cpu": "16MiB"}
"""`train.expert_memory: auto`: on a GPU a few launches for a layer of small experts, on a CPU what fits its caches
(docs/concepts/expert-bank.md)."""


@dataclass(frozen=True)
class ResolvedModel:
    """The model of a run: found, configured, and built on the meta device.

    Attributes:
        config: the `model:` block.
        source: its name, and where its weights are.
        published: how they are stored there.
        settings: transformers' configuration with the run's attention and dtype. Not to be changed.
        plain: the model on the meta device, before any adaptation. Not to be changed.
    """

    config: ResolvedModelConfig
    source: ModelSource
    published: SourceQuantization
    settings: PretrainedConfig = field(repr=False)
    plain: PreTrainedModel = field(repr=False)
    structure: ModelStructure = field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of compute and of trained weights, except low-rank factors, which are float32."""
        return DTYPES[self.config.dtype]

    @property
    def gate_up_apart(self) -> bool:
        """Whether an expert's gate and up are quantized separately: they are kept as they are published."""
        return keeps_gate_up_apart(self.published, self.config)


@dataclass(frozen=True)
class ResolvedRun:
    """A run file on its model, for a kind of device.

    Attributes:
        selection: what trains.
        parts: name in the adapted model -> part, of every parameter that trains, on all ranks together.
        optimizers: of the parts that train.
        placement: layer index -> expert ids of each of the `ep` ranks; empty where experts are not spread.
        router_scores: layer index -> the function of its router's logits, under `train.dense_router_gradient`.
        router_biases: layer index -> the buffer that `train.router_bias_rate` updates.
        scored: the scores that experts were chosen by, each with its key of the run file.
        problems: why it can be neither predicted nor trained; empty for a run of `resolve`.
    """

    config: ResolvedConfig
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
    def trains(self) -> frozenset[Part]:
        """The parts that train."""
        return frozenset(self.parts.values())

    @property
    def expert_memory(self) -> int:
        """Bytes for the dequantized matrices of experts that are computed together."""
        asked = self.config.train.expert_memory
        return parse_size(_EXPERT_MEMORY[self.device_type] if asked == "auto" else asked) or 0

    @cached_property
    def quantized_linears(self) -> tuple[str, ...]:
        """Paths of the linear layers that are stored in base precision."""
        return tuple(linears_to_quantize(self.model.plain, self.structure, self.selection))

    def device(self, device: torch.device | str | None = None) -> torch.device:
        """Return `device`, or the first one of this machine of the kind that the run is resolved for.

        Raises:
            UserError: it is of another kind, or there is none.
        """
        chosen = torch.device(device or self.device_type)
        if chosen.type != self.device_type:
            raise UserError(f"the run is resolved for {self.device_type}; resolve it for {chosen.type}")
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise UserError("the run is resolved for a GPU, and this machine has none; resolve it for cpu")
        return chosen

    def placed_at(self, ep: int) -> Placement:
        """Return the experts of one of the `ep` ranks."""
        return Placement(ep, self.placement) if self.placement else EVERYTHING

    def with_random_weights(self) -> ResolvedRun:
        """Return the same run with `model.weights: random`."""
        config = self.config.but(model={"weights": "random"})
        return replace(self, config=config, model=replace(self.model, config=config.model))

    def without_layers(self, layers: Collection[int]) -> ResolvedRun:
        """Return the same run on a model that skips these decoder layers, for a prediction."""
        structure, selection = self.structure.without(layers), self.selection.without(layers, self.structure)
        plain = copy.deepcopy(self.model.plain)
        leave_out(plain, layers)
        return replace(
            self,
            model=replace(self.model, plain=plain, structure=structure),
            selection=selection,
            parts=parts_by_name(structure, selection),
            placement={layer: held for layer, held in self.placement.items() if layer not in layers},
        )

    def refuse_other_scores(self, base: str | None) -> None:
        """Raise `UserError` if experts were chosen by scores of another checkpoint than the one with this digest."""
        for where, scores in self.scored:
            refuse_other_base(scores, self.config.model.path, base, where)


def raise_problems(problems: Iterable[str]) -> None:
    """Raise `UserError` with all problems, each once, if there are any."""
    if lines := dict.fromkeys(problems):
        raise UserError("\n".join(lines))
