"""What leaves a rank in one step: rings that gather and add up, experts' rows, pipeline stages.

Formulas, sources and assumptions: docs/concepts/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from typing import Literal

from moetune.memory.quantities import Layer, Quantities
from moetune.memory.report import Collective


def part(amount: int, ranks: int, index: int) -> int:
    """What rank `index` of `ranks` gets of an amount: the first `amount mod ranks` get one more than the others."""
    return amount // ranks + (index < amount % ranks)


def reduce_scatter(size: int, ranks: int) -> int:
    """Bytes that leave each rank of a ring: (n - 1)/n of the whole tensor, in n padded chunks."""
    return (ranks - 1) * ceil(Fraction(size, ranks))


def all_gather(size: int, ranks: int) -> int:
    """As many as `reduce_scatter`: `size` is the whole tensor again."""
    return reduce_scatter(size, ranks)


def all_reduce(size: int, ranks: int) -> int:
    """A reduce-scatter, then an all-gather."""
    return reduce_scatter(size, ranks) + all_gather(size, ranks)


def ring(
    kind: Literal["all-reduce", "reduce-scatter", "all-gather"],
    axis: str,
    what: str,
    sizes: Iterable[int],
    ranks: int,
    times: int = 1,
) -> Collective:
    """One call for each tensor of some size, `times` over."""
    moves = {"all-reduce": all_reduce, "reduce-scatter": reduce_scatter, "all-gather": all_gather}[kind]
    calls = [moves(size, ranks) for size in sizes if size]
    return Collective(kind, axis, what, len(calls) * times, sum(calls) * times)


def split_collectives(layers: Sequence[Layer], tp: int, steps: int, *, checkpointing: bool) -> Iterator[Collective]:
    """Tensor parallelism of attention. A layer runs forward once, and once more in backward under checkpointing."""
    splits = [layer.split for layer in layers if layer.split is not None]
    added = [size for one in splits for size in one.added * (1 + checkpointing) + one.added_back]
    gathered = [
        size for one in splits for size in one.gathered * (1 + (checkpointing and one.again)) + one.gathered_back
    ]
    yield ring("all-reduce", "tp", "activations", added, tp, steps)
    yield ring("all-gather", "tp", "experts' outputs", gathered, tp, steps)


def exchange_collective(layers: Sequence[Layer], steps: int, *, checkpointing: bool) -> Collective:
    """Expert parallelism: dispatch, combine and the table of counts forward, and again where backward computes them
    anew; dispatch and combine in backward."""
    calls = moved = 0
    for layer in layers:
        if layer.exchange is not None:
            forward = 1 + (checkpointing and layer.returns)
            calls += 2 * (forward + layer.returns) + forward
            moved += (layer.exchange.sent + layer.exchange.arrived) * (forward + layer.returns)
            moved += layer.exchange.counts * forward
    return Collective("all-to-all", "ep", "experts' rows", calls * steps, moved * steps)


def stage_collectives(q: Quantities, stage: int, pp: int, tied_gradient: int) -> Iterator[Collective]:
    """Pipeline parallelism: an activation onwards and a gradient back; a tied embedding's gradient between the ends."""
    calls = ((stage > 0) + (stage < pp - 1)) * q.accumulate
    yield Collective("point-to-point", "pp", "hidden activations", calls, calls * q.hidden)
    if q.tied and stage in (0, pp - 1):
        times = q.accumulate if q.tensors.alone else 1
        yield ring("all-reduce", "pp", "gradients of the tied embedding", [tied_gradient], 2, times)
