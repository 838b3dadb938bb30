"""The parameter counter: in all, per component, per layer, per expert, and active for one token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moetune.models.components import COMPONENTS, Component
from moetune.models.structure import ModelStructure


@dataclass(frozen=True)
class LayerCount:
    """Parameters of one decoder layer. `num_experts` and `top_k` are None in a layer without experts."""

    index: int
    total: int
    active: int
    num_experts: int | None
    top_k: int | None


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of one model; what is tied counts once.

    Attributes:
        active_per_token: parameters that take part in the forward pass of one token: all but the experts that
            it is not sent to. The whole embedding table counts, as in published figures.
        active: the same per component.
        per_expert, num_experts, top_k: one number if all mixture-of-experts layers agree, else one a layer,
            in order; None for a dense model.
    """

    model_type: str
    total: int
    active_per_token: int
    components: dict[Component, int]
    active: dict[Component, int]
    per_expert: int | list[int] | None
    num_moe_layers: int
    num_experts: int | list[int] | None
    top_k: int | list[int] | None
    layers: tuple[LayerCount, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `moetune count --json` prints."""
        return {
            "schema": 1,
            "model_type": self.model_type,
            "total": self.total,
            "active_per_token": self.active_per_token,
            "per_expert": self.per_expert,
            "num_moe_layers": self.num_moe_layers,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "components": dict(self.components),
            "layers": [asdict(layer) for layer in self.layers],
        }


def count_parameters(structure: ModelStructure) -> ParameterCount:
    """Counts the parameters of a model.

    A token uses `top_k` of the experts of each mixture-of-experts layer, so
    `active = total - sum over those layers of parameters_per_expert * (num_experts - top_k)`.
    """
    components: dict[Component, int] = dict.fromkeys(COMPONENTS, 0)
    layer_totals = dict.fromkeys(range(structure.num_layers), 0)
    for part in structure.parts:
        components[part.component] += part.numel
        if part.layer is not None:
            layer_totals[part.layer] += part.numel
    total = sum(part.numel for part in structure.parts)
    assert sum(components.values()) == total
    idle = {
        layer.index: layer.shape.parameters_per_expert * (layer.shape.num_experts - layer.top_k)
        for layer in structure.moe_layers
    }
    moe = {layer.index: layer for layer in structure.moe_layers}
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
    )


def _agreed(values: list[int]) -> int | list[int] | None:
    if not values:
        return None
    return values[0] if len(set(values)) == 1 else values
