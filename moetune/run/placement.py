"""Placement of experts on the ranks of `parallel.ep`, balanced by parameters and load.

Every rank holds the same number of a layer's experts, so frozen experts take equal memory. Experts are placed by
decreasing cost, each on the rank with the lowest cost so far over all layers: longest processing time first (Graham,
"Bounds on multiprocessing timing anomalies", 1969).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moetune.errors import UserError
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure


@dataclass(frozen=True)
class Placement:
    """The experts that one rank holds.

    Attributes:
        ep: index of the rank among the `parallel.ep` ranks that the experts are divided over.
        experts: layer index -> for each of these ranks, its expert ids, ascending; empty if experts are not divided.
    """

    ep: int = 0
    experts: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def held(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """Return the ids of a layer's experts on this rank; all of the `num_experts` ids if they are not divided."""
        return self.experts[layer][self.ep] if layer in self.experts else tuple(range(num_experts))


EVERYTHING = Placement()
"""The placement of a rank that holds all experts."""


def balance_experts(
    structure: ModelStructure, selection: Selection, ep: int, load: Mapping[int, Sequence[float]] | None = None
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Divide the experts of every layer over `ep` ranks; return layer index -> for each rank its expert ids, ascending.

    Trained parameters are balanced first, because each costs several times its own size in gradients and optimizer
    states; then the load. In a layer whose experts are all alike in both, each rank gets contiguous ids.

    Args:
        ep: number of ranks; must divide the number of experts of every layer.
        load: layer index -> tokens per expert, in any scale; a layer without an entry counts as evenly loaded.

    Raises:
        UserError: `load` has another number of experts for a layer than the model.
    """
    trained_so_far, load_so_far = [0] * ep, [0.0] * ep
    placement: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in structure.moe_layers:
        count = layer.shape.num_experts
        weights = trained_parameters(layer, selection)
        tokens = [float(x) for x in (load or {}).get(layer.index, [1.0] * count)]
        if len(tokens) != count:
            raise UserError(f"parallel.load: has {len(tokens)} experts for layer {layer.index}, which has {count}")
        total = sum(tokens) or 1.0
        tokens = [x / total for x in tokens]
        held: list[list[int]] = [[] for _ in range(ep)]
        if len(set(weights)) == len(set(tokens)) == 1:
            held = [list(range(rank * count // ep, (rank + 1) * count // ep)) for rank in range(ep)]
        else:
            for expert in sorted(range(count), key=lambda e: (-weights[e], -tokens[e], e)):
                open_ranks = [rank for rank in range(ep) if len(held[rank]) < count // ep]
                rank = min(open_ranks, key=lambda r: (trained_so_far[r] if weights[expert] else 0, load_so_far[r], r))
                held[rank].append(expert)
                trained_so_far[rank] += weights[expert]
                load_so_far[rank] += tokens[expert]
        placement[layer.index] = tuple(tuple(sorted(ids)) for ids in held)
    return placement


def trained_parameters(layer: MoeLayer, selection: Selection) -> list[int]:
    """Return the number of trained parameters of each expert of a layer."""
    counts = [0] * layer.shape.num_experts
    for expert in selection.lora_experts.get(layer.index, ()):
        counts[expert] = layer.shape.trained_parameters(selection.lora, selection.ranks.get(layer.experts))
    for expert in selection.experts.get(layer.index, ()):
        counts[expert] = layer.shape.parameters_per_expert
    return counts
