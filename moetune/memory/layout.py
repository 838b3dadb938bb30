"""How parallelism divides a model over many ranks, and what the ranks then send each other.

The axes, innermost first: `tp` ranks split attention, `fsdp` ranks share one copy of the weights, `replicate` such
groups hold one each, `pp` stages split the layers. `ep` regroups the replicate · fsdp · tp ranks of a stage:
consecutive ranks hold different experts. Formulas, sources and assumptions: docs/concepts/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from moetune.config import ParallelConfig
from moetune.errors import UserError
from moetune.memory import textbook
from moetune.memory.collectives import exchange_collective, part, split_collectives, stage_collectives
from moetune.memory.formulas import Setup, quantities_of
from moetune.memory.quantities import Layer, Quantities, Tensors, total
from moetune.memory.report import Collective
from moetune.memory.sharded import Buffers, Sharded, largest
from moetune.memory.textbook import Sharing, Unit
from moetune.parallel.place import Place, expert_copies, expert_shards, indivisible

At = Callable[[Place], Quantities]
"""What the rank at a place has of a model, before `fsdp` and `pp` divide it."""


@dataclass(frozen=True)
class RankShare:
    """One rank's part.

    Attributes:
        quantities: what the rank's device holds, buffers included (in `transients`, `loss`, `embedding_backward`).
        host: what offloading moved to the host.
        buffers: those of the layer that needs most.
        collectives: what leaves this rank in one step.
    """

    rank: int
    place: Place
    quantities: Quantities
    host: Tensors
    buffers: Buffers
    collectives: tuple[Collective, ...]


def divide_run(setup: Setup) -> tuple[RankShare, ...]:
    """All ranks of a run, in the order of their numbers.

    Raises:
        UserError: as `divide`; or as `place_experts`.
    """
    parallel = setup.config.parallel
    refuse_indivisible(
        parallel,
        layers=len(setup.facts.layers),
        experts=[layer.experts.shape.num_experts for layer in setup.facts.layers if layer.experts],
        kv_heads=min(layer.attention.kv_heads for layer in setup.facts.layers),
    )
    if parallel.tp == parallel.ep == 1:
        return divide(quantities_of(setup), parallel, checkpointing=setup.run.checkpointed)
    by_ep = cache(lambda ep: quantities_of(setup.at(Place(ep=ep))))  # tp ranks are alike
    return divide(lambda place: by_ep(place.ep), parallel, checkpointing=setup.run.checkpointed)


def divide(whole: Quantities | At, parallel: ParallelConfig, *, checkpointing: bool = True) -> tuple[RankShare, ...]:
    """Divides one rank's model over all ranks, in the order of their numbers.

    Args:
        whole: what each has before `fsdp` and `pp` divide it: the same, or what its place says.
        checkpointing: layers run forward again in backward, and communicate again.

    Raises:
        UserError: more parts are asked for than there are layers or experts, or they do not divide.
    """
    at: At = whole if callable(whole) else lambda _: whole
    places = [Place.of(parallel, rank) for rank in range(parallel.ranks)]
    refuse_indivisible(parallel, layers=len(at(places[0]).layers))
    if parallel.ranks == 1 and parallel.offload == "none":
        return (RankShare(0, places[0], at(places[0]), Tensors(), Buffers(), ()),)
    share = _by_engine if parallel.engine == "fsdp2" and parallel.offload == "none" else _by_textbook
    cached: dict[Place, RankShare] = {}
    for rank, place in enumerate(places):
        # Quantities that every rank shares need no second look; places that differ in their copy only are alike.
        key = replace(place, replicate=0, copy=0)
        if key not in cached:
            q = _stage(at(place), parallel, place.pp)
            more = _common(q, parallel, place, at(place).embedding.trainable, checkpointing)
            alone = share(q, parallel, place)
            cached[key] = replace(alone, collectives=tuple(c for c in (*alone.collectives, *more) if c.bytes))
        cached[place] = replace(cached[key], rank=rank, place=place)
    return tuple(cached[place] for place in places)


def refuse_indivisible(
    parallel: ParallelConfig, *, layers: int, experts: Sequence[int] | None = None, kv_heads: int | None = None
) -> None:
    """Raises `UserError` with every size of `parallel` that a model does not have the parts for.

    Args:
        experts: how many each layer with experts has; None if that is known to be right.
    """
    counts = [parallel.ep] if experts is None else experts
    problems = indivisible(parallel, layers=layers, experts=counts, kv_heads=kv_heads)
    if problems:
        raise UserError("\n".join(problems))


def model_states(tensors: Tensors) -> int:
    """ZeRO's model states: weights, gradients, optimizer states and master weights."""
    return tensors.frozen + tensors.trainable + tensors.gradients + tensors.states + tensors.master


# --- Pipeline stages ----------------------------------------------------------------------------------------------


def _stage(q: Quantities, parallel: ParallelConfig, stage: int) -> Quantities:
    """Contiguous layers; where they do not divide, the first stages hold one more than the others."""
    if parallel.pp == 1:
        return q
    count, pp = len(q.layers), parallel.pp
    start = sum(part(count, pp, k) for k in range(stage))
    layers = q.layers[start : start + part(count, pp, stage)]
    first, last = stage == 0, stage == pp - 1
    head, tail = q.head if last else Tensors(), q.tail if last else ()
    if q.tied and last and not first:
        head, tail = head + q.embedding, tail + q.table
    saved = q.saved if last else 0
    waiting = min(pp - stage, q.accumulate) - 1  # 1F1B: beside the micro-batch in backward
    neighbours = (not first) + (not last)
    return replace(
        q,
        embedding=q.embedding if first else Tensors(),
        layers=tuple(_receiving(layer, neighbours * q.hidden) for layer in layers),
        head=head,
        saved=saved,
        loss=(q.loss if last else 0) + neighbours * q.hidden,
        embedding_backward=q.embedding_backward if first else 0,
        in_flight=waiting * (saved + sum(layer.saved for layer in layers)),
        table=q.table if first else (),
        norm=q.norm if last else (),
        tail=tail,
    )


def _receiving(layer: Layer, size: int) -> Layer:
    """With buffers for what neighbouring stages send."""
    return replace(layer, transients=tuple(replace(moment, dense=moment.dense + size) for moment in layer.transients))


def _common(
    q: Quantities, parallel: ParallelConfig, place: Place, tied: int, checkpointing: bool
) -> Iterator[Collective]:
    """What a stage sends for tp, ep and pp, whatever the engine. `tied`: bytes of the gradient of a tied embedding."""
    if parallel.tp > 1:
        yield from split_collectives(q.layers, parallel.tp, q.accumulate, checkpointing=checkpointing)
    if parallel.ep > 1:
        yield exchange_collective(q.layers, q.accumulate, checkpointing=checkpointing)
    if parallel.pp > 1:
        yield from stage_collectives(q, place.pp, parallel.pp, part(tied, parallel.fsdp, place.fsdp))


# --- Engines ------------------------------------------------------------------------------------------------------


def _by_engine(q: Quantities, parallel: ParallelConfig, place: Place) -> RankShare:
    sharded = Sharded(q, parallel, place)
    return RankShare(0, place, sharded.quantities(), Tensors(), largest(sharded), tuple(sharded.collectives()))


def _by_textbook(q: Quantities, parallel: ParallelConfig, place: Place) -> RankShare:
    dense = Sharing("fsdp", "", parallel.fsdp, place.fsdp, parallel.replicate)
    experts = dense
    if parallel.ep > 1:
        experts = Sharing("efsdp", " of experts", expert_shards(parallel), place.shard, expert_copies(parallel))
    layers: list[Unit] = [((dense, layer.dense), (experts, total(layer.experts))) for layer in q.layers]
    chain: list[Unit] = [((dense, q.embedding),), *layers, ((dense, q.head),)]
    buffers = _textbook_buffers(chain, parallel, textbook.bucket(q.tensors, parallel) if parallel.fsdp > 1 else 0)
    kept = [textbook.kept(unit, parallel) for unit in chain]
    divided = tuple(
        replace(
            layer,
            dense=device[0],
            experts=(device[1],) if layer.experts else (),
            transients=tuple(replace(moment, dense=moment.dense + more.total) for moment in layer.transients),
        )
        for layer, (device, _), more in zip(q.layers, kept[1:-1], buffers[1:-1], strict=True)
    )
    quantities = replace(
        q,
        embedding=total(kept[0][0]),
        layers=divided,
        head=total(kept[-1][0]),
        loss=q.loss + buffers[-1].total,
        embedding_backward=q.embedding_backward + buffers[0].total,
    )
    return RankShare(
        0,
        place,
        quantities,
        host=total(host for _, hosts in kept for host in hosts),
        buffers=max(buffers[1:-1], key=lambda b: b.total),
        collectives=tuple(textbook.collectives(chain, parallel, q.accumulate, used_up=bool(q.tensors.alone))),
    )


def _textbook_buffers(chain: Sequence[Unit], parallel: ParallelConfig, bucket: int) -> list[Buffers]:
    """By unit of the chain embedding, layers, head, at its turn in backward."""
    gathered = [textbook.gathered(unit, parallel) for unit in chain]
    unreduced = [textbook.unreduced(unit, parallel) for unit in chain]
    return [
        Buffers(
            # without resharding all weights stay whole from forward to their own backward
            gathered=gathered[k] if parallel.reshard else sum(gathered[: k + 1]),
            prefetched=gathered[k - 1] if parallel.reshard and k else 0,
            unreduced=unreduced[k],
            in_flight=bucket,
        )
        for k in range(len(chain))
    ]
