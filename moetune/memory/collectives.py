"""What ranks send each other in one step: rings of data and tensor parallelism, experts' tokens, pipeline stages.

Formulas, sources and assumptions: docs/concepts/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Literal

from moetune.config import ParallelConfig
from moetune.memory.quantities import Layer, Quantities, Tensors, total
from moetune.memory.report import Collective

DDP_BUCKET = 25 * 2**20  # torch's default bucket_cap_mb, which is in MiB


@dataclass(frozen=True)
class Place:
    """A rank's coordinates on every axis."""

    pp: int = 0
    replicate: int = 0
    fsdp: int = 0
    tp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Sharing:
    """The ranks that have the same parameters: `shards` of them share one copy, and `copies` such groups hold one."""

    axis: Literal["fsdp", "efsdp"]
    of: Literal["", " of experts"]
    shards: int
    index: int
    copies: int


Unit = tuple[tuple[Sharing, Tensors], ...]
"""Parameters that are gathered and reduced together: a layer, the embedding or the head, after tp, pp and ep."""


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


@dataclass(frozen=True)
class Communication:
    """Of one division of a model over ranks.

    Attributes:
        passes: how often a layer runs in a micro-step; 3 where backward runs forward again.
        token_share: (layer, rank of its ep group) -> the share of the layer's routed rows that go there.
    """

    whole: Quantities
    parallel: ParallelConfig
    passes: int
    token_share: Callable[[int, int], Fraction]

    def collectives(self, chain: Sequence[Unit], layers: Sequence[Layer], place: Place) -> Iterator[Collective]:
        """What leaves the rank at this place, which holds these units and layers."""
        yield from self.data_collectives(chain)
        if self.parallel.tp > 1:
            yield from self.tensor_collectives(layers, place)
        if self.parallel.ep > 1:
            yield self.expert_collective([layer for layer in layers if layer.experts], place)
        if self.parallel.pp > 1:
            yield from self.pipeline_collectives(chain[0], chain[-1], place)

    def data_collectives(self, chain: Sequence[Unit]) -> Iterator[Collective]:
        """ZeRO's and DDP's: weights gathered, gradients reduced, once for every sharing."""
        p, steps = self.parallel, self.whole.accumulate
        reductions = (
            steps if self.whole.tensors.alone else 1
        )  # a fused backward updates, so it reduces, in every micro-step
        for sharing in dict.fromkeys(sharing for unit in chain for sharing, _ in unit):
            groups = [total(t for s, t in unit if s == sharing) for unit in chain]
            n, axis, of = sharing.shards, sharing.axis, sharing.of
            trained = [t.trainable for t in groups]  # a gradient has its weight's dtype
            if n > 1 and p.zero == 3:
                # the head's backward follows its forward; all else is gathered again, a frozen embedding by prefetch
                sizes = [sharded_weights(t) for t in (groups + groups[:-1] if p.reshard else groups)]
                yield _ring("all-gather", axis, f"weights{of}", sizes, n, steps)
                yield _ring("reduce-scatter", axis, f"gradients{of}", trained, n, steps)
            elif n > 1:
                yield _ring("reduce-scatter", axis, f"gradients{of}", trained, n, steps if p.zero == 2 else reductions)
                yield _ring("all-gather", axis, f"updated weights{of}", [t.trainable for t in groups], n, 1)
            if sharing.copies > 1:
                reduced = [part(size, n, sharing.index) for size in trained]
                buckets = _ring("all-reduce", "replicate", f"gradients{of}", reduced, sharing.copies, reductions)
                yield buckets if n > 1 else replace(buckets, calls=ceil(sum(reduced) / DDP_BUCKET) * reductions)

    def tensor_collectives(self, layers: Sequence[Layer], place: Place) -> Iterator[Collective]:
        """Two all-reduces of a layer in each pass; one is a gather under ep, where ranks send slices of tokens."""
        w, p = self.whole, self.parallel
        gathers = sum(p.ep > 1 and bool(layer.experts) for layer in layers)
        reduces = 2 * len(layers) - gathers
        head = int(place.pp == p.pp - 1)  # column-split: its input's gradient is reduced, its logits are gathered
        calls = reduces * self.passes + head
        yield _ring("all-reduce", "tp", "hidden activations", [w.hidden] * calls, p.tp, w.accumulate)
        yield _ring("all-gather", "tp", "expert outputs", [w.hidden] * gathers * self.passes, p.tp, w.accumulate)
        yield _ring("all-gather", "tp", "logits", [w.logits] * head, p.tp, w.accumulate)

    def expert_collective(self, layers: Sequence[Layer], place: Place) -> Collective:
        """Dispatch and combine. A rank sends rows to other ranks' experts, and returns the rows that it received."""
        sent = Fraction(self.whole.routed, self.parallel.tp)
        moved = 0
        for layer in layers:
            share = self.token_share(layer.index, place.ep)
            moved += ceil(sent * (1 - share) + sent * share * (self.parallel.ep - 1))
        times = self.passes * self.whole.accumulate
        return Collective("all-to-all", "ep", "tokens", calls=2 * len(layers) * times, bytes=moved * times)

    def pipeline_collectives(self, embedding: Unit, head: Unit, place: Place) -> Iterator[Collective]:
        w, p = self.whole, self.parallel
        calls = ((place.pp > 0) + (place.pp < p.pp - 1)) * w.accumulate  # a gradient back, an activation onwards
        yield Collective("point-to-point", "pp", "hidden activations", calls, calls * w.hidden)
        if w.tied and place.pp in (0, p.pp - 1):
            ((sharing, _),) = embedding if place.pp == 0 else head
            size = part(w.embedding.trainable, sharing.shards, sharing.index)
            yield _ring(
                "all-reduce", "pp", "gradients of the tied embedding", [size], 2, w.accumulate if w.tensors.alone else 1
            )


def sharded_weights(tensors: Tensors) -> int:
    return tensors.trainable + tensors.frozen - tensors.packed


def _ring(
    kind: Literal["all-reduce", "reduce-scatter", "all-gather"],
    axis: str,
    what: str,
    sizes: Iterable[int],
    ranks: int,
    times: int,
) -> Collective:
    """One call for each tensor of some size, `times` over."""
    moves = {"all-reduce": all_reduce, "reduce-scatter": reduce_scatter, "all-gather": all_gather}[kind]
    calls = [moves(size, ranks) for size in sizes if size]
    return Collective(kind, axis, what, len(calls) * times, sum(calls) * times)
