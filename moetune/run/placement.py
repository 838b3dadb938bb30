"""Which rank holds which experts.

Every rank holds equally many experts of a layer, so that frozen ones take the same memory everywhere; what trains and
what is used most are spread. The costly ones go first, each to the rank that has least so far, counted over all layers:
longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moetune.errors import UserError
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure


@dataclass(frozen=True)
class Placement:
    """Of one rank.

    Attributes:
        ep: the rank's number among those that the experts are spread over.
        experts: layer index -> for each of these ranks the ids that it holds, in the order of its slots.
    """

    ep: int = 0
    experts: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def held(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """Ids of a layer's experts on this rank; all of them where nothing is spread."""
        return self.experts[layer][self.ep] if layer in self.experts else tuple(range(num_experts))


EVERYTHING = Placement()
"""A rank that holds all experts."""


def balance_experts(
    structure: ModelStructure, selection: Selection, ep: int, load: Mapping[int, Sequence[float]] | None = None
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """For each layer the ids on each of `ep` ranks.

    Trained parameters are balanced first, because each costs several times its size in gradients and optimizer states;
    then the load. Where neither differs, ids are contiguous.

    Args:
        load: by layer index, the tokens that each expert is known to receive (any scale).
    """
    trained_so_far, load_so_far = [0] * ep, [0.0] * ep
    placement: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in structure.moe_layers:
        count = layer.shape.num_experts
        weights = _trained_parameters(layer, selection)
        tokens = [float(x) for x in (load or {}).get(layer.index, [1.0] * count)]
        if len(tokens) != count:
            raise UserError(f"parallel.load: has {len(tokens)} experts for layer {layer.index}, which has {count}")
        tokens = [x / (sum(tokens) or 1.0) for x in tokens]
        held: list[list[int]] = [[] for _ in range(ep)]
        if len(set(weights)) == len(set(tokens)) == 1:
            held = [list(range(rank * count // ep, (rank + 1) * count // ep)) for rank in range(ep)]
        else:
            for expert in sorted(range(count), key=lambda e: (-weights[e], -tokens[e], e)):
                room = [rank for rank in range(ep) if len(held[rank]) < count // ep]
                rank = min(room, key=lambda r: (trained_so_far[r] if weights[expert] else 0, load_so_far[r], r))
                held[rank].append(expert)
                trained_so_far[rank] += weights[expert]
                load_so_far[rank] += tokens[expert]
        placement[layer.index] = tuple(tuple(sorted(ids)) for ids in held)
    return placement


def _trained_parameters(layer: MoeLayer, selection: Selection) -> list[int]:
    """Of each expert of a layer; of LoRA with one A for gate and up, which decides nothing between experts."""
    shape = layer.shape
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    rank = 0 if selection.lora is None else selection.lora.rank
    factors = rank * (shape.hidden + rows + shape.intermediate + shape.hidden)
    trained, lora = selection.experts.get(layer.index, ()), selection.lora_experts.get(layer.index, ())
    return [
        shape.parameters_per_expert if expert in trained else factors if expert in lora else 0
        for expert in range(shape.num_experts)
    ]
