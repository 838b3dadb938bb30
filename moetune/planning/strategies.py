"""The strategies that a plan tries for each goal: storage, optimizer, checkpointing, best first.

A strategy does not say how many experts train, with what rank, or on how many rows: search.py finds the largest values
that fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, Literal, get_args

from moetune.config.resolved import ResolvedBase
from moetune.formats.table import FORMATS
from moetune.models.structure import ModelStructure
from moetune.planning.savings import is_setting_of_host

Goal = Literal["router", "experts", "lora"]
GOALS: tuple[Goal, ...] = get_args(Goal)


@dataclass(frozen=True)
class Strategy:
    """A way to train: settings that decide which tensors a step needs, and what they cost in quality or speed.

    Attributes:
        goal: what trains: `router`, `experts` or `lora`.
        settings: values of the run file by dotted key.
        gives_up: what the settings cost, in words; empty if nothing.
        order: its position among the strategies for the goal that divide a run over GPUs alike, 0 for the best.
    """

    goal: Goal
    settings: dict[str, Any]
    gives_up: tuple[str, ...] = ()
    order: int = field(default=0, compare=False)

    @property
    def words(self) -> str:
        """The values of the settings of model and optimizer as text, such as `nf4, adamw8bit, stochastic`."""
        chosen = ((key, value) for key, value in self.settings.items() if key.startswith(("model", "optimizer")))
        return ", ".join(key.partition(".")[2] if value is True else str(value) for key, value in chosen)

    @property
    def on_host(self) -> int:
        """How many settings move tensors to host memory."""
        return sum(is_setting_of_host(key, value) for key, value in self.settings.items())

    @property
    def costs(self) -> tuple[int, bool]:
        """What counts before what trains, most important first: how many settings move tensors to host memory, and
        whether the optimizer lacks moments, as LOMO and SGD do, or steps of several micro-batches and clipping."""
        fused = "optimizer.fused_backward" in self.settings
        return self.on_host, fused or self.settings["optimizer.name"] in ("lomo", "sgd")

    def place(self, amount: int, speed: float) -> tuple[float, ...]:
        """Return a sort key, smallest for the most useful of a goal's strategies, if `amount` trains
        (`Candidate.amount`) at a `speed`: one that keeps least in host memory; then with moments; then what trains
        most; then what gives up least; then, of several ways to divide the run over GPUs, the fastest."""
        return *self.costs, -amount, self.order, -speed

    @property
    def storage(self) -> dict[str, Any]:
        """The settings that say how weights are stored, and how they are divided over GPUs."""
        return {key: value for key, value in self.settings.items() if not key.startswith(("optimizer.", "train."))}

    @property
    def layout(self) -> dict[str, Any]:
        """The settings that say how a run is divided over GPUs."""
        return {key: value for key, value in self.settings.items() if key.startswith(("parallel.", "hardware."))}

    @property
    def slowness(self) -> int:
        """How much of what a step reads lies in host memory: 0 for weights and layer inputs on the GPU; 1 for layer
        inputs in host memory, 2 for experts, 3 for both. Slower strategies are searched only if no faster one fits."""
        offloads_inputs = self.settings["train.checkpointing"] == "offload"
        return 2 * (self.settings.get("model.experts_on") == "host") + offloads_inputs


_MICRO_STEPS = 8
_Choices = list[tuple[dict[str, Any], tuple[str, ...]]]
"""Alternatives: the settings of each, and what they give up."""


def _updates(name: str, master_weights: str | None = None) -> dict[str, Any]:
    return {"optimizer.name": name} | ({"optimizer.master_weights": master_weights} if master_weights else {})


_STATES = "states in 8 bits"
_FUSED = {"optimizer.fused_backward": True, "train.accumulate": 1, "train.max_grad_norm": 0}
_OPTIMIZERS: dict[Goal, _Choices] = {
    "experts": [
        (_updates("adamw", "fp32"), ()),
        (_updates("adamw8bit", "stochastic"), (f"{_STATES}, weights rounded stochastically",)),
        (_updates("lomo", "stochastic") | {"train.accumulate": 1}, ("no moments (LOMO is SGD), no accumulation",)),
        (_updates("adamw") | {"optimizer.offload": True}, ("speed: gradients leave and weights return every step",)),
    ],
    "lora": [
        (_updates("adamw"), ()),
        (_updates("adamw8bit"), (_STATES,)),
        (_updates("adamw8bit") | _FUSED, (_STATES, "no accumulation and no clipping (gradients are freed early)")),
    ],
    "router": [(_updates("adamw"), ())],
}
_OVER_RANKS: _Choices = [
    (_updates("adamw", "fp32"), ()),
    (_updates("adamw8bit", "fp32"), (_STATES,)),
    (_updates("adamw8bit", "none"), (_STATES, "updates so small that 16-bit weights round them away")),
]
"""Optimizers for experts on several GPUs: those that can update a shard of a weight
(`run.validation.unsharable_optimizers`)."""
_HOST, _SLOWER = {"model.experts_on": "host"}, "speed: experts come from the host"
_BASES: _Choices = [
    ({"model.base": "bf16"}, ()),
    ({"model.base": "int8"}, ("the base in 8 bits",)),
    ({"model.base": "nf4"}, ("the base in 4 bits",)),
    ({"model.base": "nf4", **_HOST}, ("the base in 4 bits", _SLOWER)),
]
_CHECKPOINTING: _Choices = [
    ({"train.checkpointing": "auto"}, ()),
    ({"train.checkpointing": "offload"}, ("speed: layers' inputs go to the host and back",)),
]
_COPIED_ONCE: _Choices = [({**settings, "train.layer_by_layer": True}, lost) for settings, lost in _CHECKPOINTING]
"""The same with experts on the host copied once a step. What all micro-batches hold then counts, also on the host."""


def strategies(
    goal: Goal, structure: ModelStructure, count: int, published: ResolvedBase | None = None, *, in_trl: bool = False
) -> Iterator[Strategy]:
    """Yield the strategies for a goal on `count` GPUs, best first.

    `published` is the storage type in which the model is published, if it is quantized; `in_trl` whether TRL trains,
    one micro-batch after the other, as several GPUs do; neither frees gradients in backward. Experts are trained with
    FSDP alone only where expert parallelism is impossible: every rank then stores all frozen experts, so fewer fit; and
    not over the stages of a pipeline, which would be cut anew for each number of experts. Stages keep nothing in host
    memory.
    """
    optimizers = _OVER_RANKS if count > 1 and goal == "experts" else _OPTIMIZERS[goal]
    for layout in islice(layouts(structure, count), 1 if goal == "experts" else None):
        order = 0
        for (base, lost), (optimizer, lost_too) in product(_bases(published), optimizers):
            if "optimizer.fused_backward" in optimizer and (count > 1 or in_trl):
                continue
            several = count == 1 and not in_trl and optimizer.get("train.accumulate") != 1
            copied_once = "model.experts_on" in base and several
            for checkpointing, lost_as_well in (*_COPIED_ONCE, _CHECKPOINTING[-1]) if copied_once else _CHECKPOINTING:
                settings = {"train.accumulate": _MICRO_STEPS, **layout, **base, **optimizer, **checkpointing}
                on_host = any(is_setting_of_host(key, value) for key, value in settings.items())
                if not on_host or "parallel.pp" not in layout:
                    yield Strategy(goal, settings, (*lost, *lost_too, *lost_as_well), order)
                order += 1


def _bases(published: ResolvedBase | None) -> _Choices:
    """Return the storages to try: of a model that is published quantized first that one, as more bits would hold the
    same weights; then those of fewer bits."""
    if published is None or published == "nf4":
        return _BASES
    kept: dict[str, Any] = {"model.base": published if isinstance(published, str) else "auto"}
    fewer_bits = isinstance(published, str) and FORMATS[published].bits > 5
    return [(kept, ()), *(_BASES[2:] if fewer_bits else [({**kept, **_HOST}, (_SLOWER,))])]


def layouts(structure: ModelStructure, count: int) -> Iterator[dict[str, Any]]:
    """Yield the settings that divide a run over `count` GPUs, best first.

    Expert parallelism comes first, if the number of experts of every layer is divisible by `count`; then FSDP alone;
    then a pipeline, whose stages send the least.
    """
    if count == 1:
        yield {}
        return
    cards = {"hardware.count": count, "parallel.fsdp": count}
    if structure.moe_layers and all(layer.shape.num_experts % count == 0 for layer in structure.moe_layers):
        yield {**cards, "parallel.ep": count}
    yield cards
    if structure.num_layers >= count:
        yield {"hardware.count": count, "parallel.pp": count}
