"""Which ranks of a run hold as much as another, so that one prediction serves them all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from moetune.adapt.build import build
from moetune.memory.routing import BALANCED, Routing
from moetune.parallel.coordinates import Coordinates
from moetune.run.resolve import AnyRun, ResolvedRun, resolve

_Value = TypeVar("_Value")


def by_kind(run: ResolvedRun, routing: Routing, find: Callable[[int], _Value]) -> dict[int, _Value]:
    """What `find` finds of each rank, by its number; ranks that hold as much as another share what it found."""
    found: dict[Hashable, _Value] = {}
    by_rank = {}
    for rank, kind in enumerate(kinds_of_ranks(run, by_expert=routing != BALANCED)):
        if kind not in found:
            found[kind] = find(rank)
        by_rank[rank] = found[kind]
    return by_rank


def kinds_of_ranks(run: AnyRun, *, by_expert: bool) -> list[Hashable]:
    """What a rank's memory depends on, in the order of ranks: how much trains of its experts, and where tensors do not
    divide evenly, which part of them it has.

    Args:
        by_expert: experts receive unlike numbers of tokens, so it matters which ones a rank holds.
    """
    run = resolve(run, "cuda")
    parallel = run.config.parallel
    if parallel.ranks == 1:
        return [()]
    adapted = build(run, "meta")
    rows = {p.shape[0] for p in adapted.model.parameters() if p.dim()}
    # DeepSpeed divides one flat tensor of all that trains, filled up so that it divides
    is_even = parallel.engine == "deepspeed" or all(size % parallel.fsdp == 0 for size in rows)
    selection = adapted.selection
    kinds: list[Hashable] = []
    for rank in range(parallel.ranks):
        at = Coordinates.of(parallel, rank)
        held = {layer: set(of_ranks[at.ep]) for layer, of_ranks in run.placement.items()}
        trained = tuple(len(held[layer] & set(ids)) for layer, ids in selection.experts.items() if layer in held)
        lora = tuple(len(held[layer] & set(ids)) for layer, ids in selection.lora_experts.items() if layer in held)
        kinds.append((trained, lora, () if is_even else (at.fsdp, at.shard), at.ep if by_expert else 0))
    return kinds
