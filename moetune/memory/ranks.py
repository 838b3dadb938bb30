"""Ranks of a run grouped by memory, so that one prediction serves each group."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from moetune.adapt.build import build
from moetune.memory.routing import BALANCED, Routing
from moetune.parallel.coordinates import Coordinates
from moetune.run.resolve import AnyRun, ResolvedRun, resolve

_Value = TypeVar("_Value")


def by_kind(run: ResolvedRun, routing: Routing, find: Callable[[int], _Value]) -> dict[int, _Value]:
    """Call `find` once for each kind of rank; return its results by rank."""
    found: dict[Hashable, _Value] = {}
    by_rank = {}
    for rank, kind in enumerate(kinds_of_ranks(run, by_expert=routing != BALANCED)):
        if kind not in found:
            found[kind] = find(rank)
        by_rank[rank] = found[kind]
    return by_rank


def kinds_of_ranks(run: AnyRun, *, by_expert: bool) -> list[Hashable]:
    """Properties that a rank's memory depends on, in the order of ranks: numbers of trained experts, and where tensors
    do not divide evenly, its shard.

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
