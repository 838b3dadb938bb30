"""Parameter counts of a model: total, active, by component, layer and expert."""

from dataclasses import dataclass, field
from typing import Any

from moetune.json_files import Answer
from moetune.models.components import COMPONENTS, Component
from moetune.models.structure import ModelStructure


@dataclass(frozen=True)
class LayerCount:
    """Number of parameters of one decoder layer; `num_experts` and `top_k` are None in a layer without experts.

    `active` counts the parameters that one token uses: all but the experts that it is not routed to.
    """

    index: int
    total: int
    active: int
    num_experts: int | None
    top_k: int | None


@dataclass(frozen=True)
class ParameterCount(Answer):
    """Parameter counts of one model. Tied parameters are counted once.

    `per_expert`, `num_experts` and `top_k` are a list with a number for each MoE layer if layers differ, and None for a
    dense model. `components` and `active` map component -> number of parameters, in all and used for one token.
    `active_per_token` leaves out the experts that a token is not routed to; it includes the whole embedding table, as
    published figures do. `not_loaded` maps path of a module that text never reaches, such as a vision tower -> its
    number of parameters, which are in no other number.
    """

    model_type: str
    total: int
    active_per_token: int
    per_expert: int | list[int] | None
    num_moe_layers: int
    num_experts: int | list[int] | None
    top_k: int | list[int] | None
    components: dict[Component, int]
    active: dict[Component, int]
    layers: tuple[LayerCount, ...]
    not_loaded: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of `moetune count --json`."""
        return {key: value for key, value in super().to_json().items() if key != "active"}


def count_parameters(structure: ModelStructure) -> ParameterCount:
    """Count the parameters of a model from its structure.

    Each token uses `top_k` experts of a layer, so active = total - Σ over expert layers of parameters_per_expert ·
    (num_experts - top_k).
    """
    components: dict[Component, int] = dict.fromkeys(COMPONENTS, 0)
    layer_totals = dict.fromkeys(range(structure.num_layers), 0)
    for parameter in structure.parameters:
        components[parameter.component] += parameter.numel
        if parameter.layer is not None:
            layer_totals[parameter.layer] += parameter.numel
    total = sum(components.values())
    moe = {layer.index: layer for layer in structure.moe_layers}
    idle = {
        index: layer.shape.parameters_per_expert * (layer.shape.num_experts - layer.top_k)
        for index, layer in moe.items()
    }
    layers = tuple(
        LayerCount(
            index,
            layer_total,
            layer_total - idle.get(index, 0),
            moe[index].shape.num_experts if index in moe else None,
            moe[index].top_k if index in moe else None,
        )
        for index, layer_total in layer_totals.items()
    )
    return ParameterCount(
        model_type=structure.model_type,
        total=total,
        active_per_token=total - sum(idle.values()),
        components=components,
        active={**components, "experts": components["experts"] - sum(idle.values())},
        per_expert=_agreed([layer.shape.parameters_per_expert for layer in structure.moe_layers]),
        num_moe_layers=len(structure.moe_layers),
        num_experts=_agreed([layer.shape.num_experts for layer in structure.moe_layers]),
        top_k=_agreed([layer.top_k for layer in structure.moe_layers]),
        layers=layers,
        not_loaded=dict(structure.dropped),
    )


def _agreed(values: list[int]) -> int | list[int] | None:
    """Return the common value of a list; the list if its values differ; None if it is empty."""
    if not values:
        return None
    return values[0] if len(set(values)) == 1 else values
