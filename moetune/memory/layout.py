"""How parallelism divides one rank's `Quantities` over many ranks, and what the ranks then send each other.

The axes, innermost first: `tp` ranks split matrices, `fsdp` ranks share one copy of the weights (ZeRO), `replicate`
such groups hold one each, `pp` stages split the layers. `ep` regroups the replicate · fsdp · tp ranks of a stage:
consecutive ranks hold different experts. Formulas, sources and assumptions: docs/concepts/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from math import ceil, gcd, inf

from moetune.config import ParallelConfig
from moetune.errors import UserError
from moetune.memory.collectives import Communication, Place, Sharing, Unit, part, sharded_weights
from moetune.memory.quantities import Layer, Quantities, Tensors, Transient, total
from moetune.memory.report import Collective
from moetune.parallel.place import indivisible


@dataclass(frozen=True)
class Buffers:
    """What communication holds on the device while one layer runs backward, in bytes.

    Attributes:
        gathered: the layer's sharded weights, made whole.
        prefetched: those of the layer whose turn is next.
        unreduced: the layer's gradients, whole until they are reduced or leave for the host.
        in_flight: a copy of them, or those of the layer before, on their way.
        exchange: rows sent to other ranks' experts, and rows received.
        hidden: activations that arrive from neighbouring pipeline stages.
    """

    gathered: int = 0
    prefetched: int = 0
    unreduced: int = 0
    in_flight: int = 0
    exchange: int = 0
    hidden: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class RankShare:
    """One rank's part.

    Attributes:
        quantities: what the rank's device holds, buffers included (in `transients`, `loss`, `embedding_backward`); a
            layer's experts are summed into one entry, its `unsplit` into `dense`.
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


def divide(
    whole: Quantities,
    parallel: ParallelConfig,
    *,
    checkpointing: bool = True,
    load: Mapping[int, Sequence[float]] | None = None,
    kv_heads: int | None = None,
) -> tuple[RankShare, ...]:
    """Divides an undivided model and one rank's micro-batch over all ranks, in the order of their numbers.

    Args:
        whole: the model as if one rank held all of it.
        checkpointing: layers run forward again in backward, and communicate again.
        load: by layer index, each expert's share of the tokens (any positive scale); layers left out are balanced.
        kv_heads: key/value heads of attention, which tp cannot divide further.

    Raises:
        UserError: more parts are asked for than there are layers, experts or heads, or they do not divide.
    """
    refuse_indivisible(whole, parallel, load, kv_heads)
    if parallel.ranks == 1 and parallel.offload == "none":
        return (RankShare(0, Place(), whole, Tensors(), Buffers(), ()),)
    divider = _Divider(whole, parallel, checkpointing, load or {})
    return tuple(divider.share(rank) for rank in range(parallel.ranks))


def refuse_indivisible(
    whole: Quantities,
    parallel: ParallelConfig,
    load: Mapping[int, Sequence[float]] | None = None,
    kv_heads: int | None = None,
) -> None:
    """Raises `UserError` with every size of `parallel` that this model does not have the parts for."""
    counts = [len(layer.experts) for layer in whole.layers if layer.experts]
    problems = indivisible(parallel, layers=len(whole.layers), experts=counts, kv_heads=kv_heads)
    experts = {layer.index: len(layer.experts) for layer in whole.layers}
    for index, shares in (load or {}).items():
        if len(shares) != experts.get(index):
            problems.append(
                f"expert load of layer {index}: {len(shares)} shares, and the model has {experts.get(index, 0)} experts"
            )
        elif shares and not (min(shares) >= 0 and 0 < sum(shares) < inf):
            problems.append(f"expert load of layer {index}: shares must be finite, none negative and not all zero")
    if problems:
        raise UserError("\n".join(problems))


def model_states(tensors: Tensors) -> int:
    """ZeRO's model states: weights, gradients, optimizer states and master weights."""
    return tensors.frozen + tensors.trainable + tensors.gradients + tensors.states + tensors.master


def _cut(tensors: Tensors, ranks: int, index: int) -> Tensors:
    return Tensors(**{f.name: part(getattr(tensors, f.name), ranks, index) for f in fields(tensors)})


def _shard(tensors: Tensors, sharing: Sharing, zero: int) -> Tensors:
    """One rank's part under ZeRO 1 (optimizer), 2 (and gradients) or 3 (and weights); packed weights stay whole."""
    cut = replace(_cut(tensors, sharing.shards, sharing.index), host=tensors.host)
    if zero < 3:
        plain = replace(cut, frozen=tensors.frozen, trainable=tensors.trainable, packed=tensors.packed)
        return plain if zero == 2 else replace(plain, gradients=tensors.gradients)
    sharded = part(tensors.frozen - tensors.packed, sharing.shards, sharing.index)
    return replace(cut, frozen=tensors.packed + sharded, packed=tensors.packed)


def _offload(tensors: Tensors, shard: Tensors, sharing: Sharing, zero: int) -> tuple[Tensors, Tensors]:
    """What stays on the device of a shard, and what goes to the host.

    Gradients follow the update to the host (ZeRO-Offload), in float32 if there are master weights. Under ZeRO-1 the
    device keeps its whole gradients as well: they are reduced once, after the last micro-step.
    """
    gradients = 4 * shard.numel if shard.master else part(tensors.gradients, sharing.shards, sharing.index)
    host = Tensors(gradients=gradients, states=shard.states, master=shard.master, numel=shard.numel)
    kept = shard.gradients if zero == 1 else 0
    return replace(shard, gradients=kept, states=0, master=0, update=0), host


class _Divider:
    """One `divide`. What many ranks have in common is computed once."""

    def __init__(
        self, whole: Quantities, parallel: ParallelConfig, checkpointing: bool, load: Mapping[int, Sequence[float]]
    ) -> None:
        self.whole, self.parallel, self.load = whole, parallel, load
        self.is_offloaded = parallel.offload == "optimizer"
        self.layers = {layer.index: layer for layer in whole.layers}
        self.held_experts = cache(self._held_experts)
        self.token_share = cache(self._token_share)
        passes = 3 if checkpointing else 2  # forward, backward, and forward again
        self.communication = Communication(whole, parallel, passes, self.token_share)

    def share(self, rank: int) -> RankShare:
        p, w = self.parallel, self.whole
        stage, inner = divmod(rank, p.replicate * p.fsdp * p.tp)
        place = Place(
            pp=stage,
            replicate=inner // (p.fsdp * p.tp),
            fsdp=inner // p.tp % p.fsdp,
            tp=inner % p.tp,
            ep=inner % p.ep,
        )
        dense = Sharing("fsdp", "", p.fsdp, place.fsdp, p.replicate)
        experts = dense
        if p.ep > 1:  # ranks with the same experts, a stride of ep apart; those of one replica shard them
            shards = p.fsdp * p.tp // gcd(p.fsdp * p.tp, p.ep)
            copies = p.replicate * p.fsdp * p.tp // p.ep // shards
            experts = Sharing("efsdp", " of experts", shards, inner // p.ep % shards, copies)
        first, last = stage == 0, stage == p.pp - 1
        layers = self.stage(stage)
        embedding: Unit = ((dense, w.embedding if first else Tensors()),)
        head_tensors = _cut(w.head, p.tp, place.tp) if last else Tensors()
        if w.tied and last and not first:
            head_tensors += w.embedding
        head: Unit = ((dense, head_tensors),)
        units: list[Unit] = [
            (
                (dense, _cut(layer.dense, p.tp, place.tp) + layer.unsplit),
                (experts, self.held_experts(layer.index, place.tp, place.ep)),
            )
            for layer in layers
        ]
        chain = [embedding, *units, head]
        buffers = self.buffers(chain, layers, place)

        kept = [self.kept(unit) for unit in chain]
        saved_outside = w.saved if last else 0
        divided = tuple(self.divide_layer(layer, kept[1 + k], buffers[1 + k], place) for k, layer in enumerate(layers))
        waiting = min(p.pp - stage, w.accumulate) - 1  # 1F1B: beside the micro-batch in backward
        quantities = replace(
            w,
            embedding=total(kept[0][0]),
            layers=divided,
            head=total(kept[-1][0]),
            saved=saved_outside,
            loss=(w.loss if last else 0) + buffers[-1].total,
            embedding_backward=w.embedding_backward + buffers[0].total if first else 0,
            in_flight=waiting * (saved_outside + sum(layer.saved for layer in divided)),
            gradients_stay=p.fsdp == 1 and p.replicate > 1 and not self.is_offloaded,
        )
        return RankShare(
            rank,
            place,
            quantities,
            host=total(host for _, hosts in kept for host in hosts),
            buffers=max(buffers[1:-1], key=lambda b: b.total),
            collectives=tuple(c for c in self.communication.collectives(chain, layers, place) if c.bytes),
        )

    def stage(self, stage: int) -> tuple[Layer, ...]:
        """Contiguous layers; where they do not divide, the first stages hold one more than the others."""
        count, pp = len(self.whole.layers), self.parallel.pp
        start = sum(part(count, pp, k) for k in range(stage))
        return self.whole.layers[start : start + part(count, pp, stage)]

    def _held_experts(self, layer: int, tp: int, ep: int) -> Tensors:
        """Whole experts with consecutive ids under ep, slices of all of them otherwise."""
        experts = self.layers[layer].experts
        if self.parallel.ep == 1:
            return _cut(total(experts), self.parallel.tp, tp)
        count = len(experts) // self.parallel.ep
        return total(experts[ep * count : (ep + 1) * count])

    def _token_share(self, layer: int, ep: int) -> Fraction:
        """The share of a layer's routed rows that go to the experts of one rank."""
        experts = len(self.layers[layer].experts)
        shares = [Fraction(float(share)) for share in self.load.get(layer, [1.0] * experts)]
        count = experts // self.parallel.ep
        return sum(shares[ep * count : (ep + 1) * count], Fraction()) / (sum(shares, Fraction()) or 1)

    def kept(self, unit: Unit) -> tuple[list[Tensors], list[Tensors]]:
        """On the device and on the host, by sharing."""
        zero = self.parallel.zero
        shards = [_shard(tensors, sharing, zero) for sharing, tensors in unit]
        if not self.is_offloaded:
            return shards, []
        moved = [_offload(tensors, shard, s, zero) for (s, tensors), shard in zip(unit, shards, strict=True)]
        return [device for device, _ in moved], [host for _, host in moved]

    def divide_layer(
        self, layer: Layer, kept: tuple[list[Tensors], list[Tensors]], buffers: Buffers, place: Place
    ) -> Layer:
        tp, ep = self.parallel.tp, self.parallel.ep
        # An ep group of n ranks holds n / tp different micro-batches: tp ranks send a slice of one each.
        received = self.token_share(layer.index, place.ep) * Fraction(ep, tp) if ep > 1 else Fraction(1)

        def activations(dense: int, split: int) -> int:
            return dense - split + ceil(Fraction(split, tp))

        def experts_rows(transient: Transient) -> int:
            if ep == 1:
                return activations(transient.experts, transient.experts_split)
            return ceil(transient.experts * received)

        return replace(
            layer,
            dense=kept[0][0],
            unsplit=Tensors(),
            experts=(kept[0][1],) if layer.experts else (),
            saved=activations(layer.saved - layer.saved_experts, layer.saved_split)
            + ceil(layer.saved_experts * received),
            saved_split=0,
            saved_experts=0,
            transients=tuple(
                replace(
                    t,
                    dense=activations(t.dense, t.split) + buffers.total,
                    experts=experts_rows(t),
                    split=0,
                    experts_split=0,
                )
                for t in layer.transients
            ),
        )

    def gathered(self, unit: Unit) -> int:
        """The unit's weights made whole, where they are sharded."""
        if self.parallel.zero < 3:
            return 0
        return sum(sharded_weights(tensors) for sharing, tensors in unit if sharing.shards > 1)

    def unreduced(self, unit: Unit) -> int:
        """The unit's gradients, where the device does not keep them whole."""
        if self.parallel.zero == 1:
            return 0
        return sum(t.gradients for sharing, t in unit if sharing.shards > 1 or self.is_offloaded)

    def buffers(self, chain: Sequence[Unit], layers: Sequence[Layer], place: Place) -> list[Buffers]:
        """By unit of the chain embedding, layers, head, at its turn in backward."""
        w, p = self.whole, self.parallel
        gathered = [self.gathered(unit) for unit in chain]
        unreduced = [self.unreduced(unit) for unit in chain]
        neighbours = (place.pp > 0) + (place.pp < p.pp - 1)
        sent = ceil(Fraction(w.routed, p.tp)) if p.ep > 1 else 0
        found = []
        for k in range(len(chain)):
            exchange = 0
            if sent and 0 < k <= len(layers) and layers[k - 1].experts:
                share = self.token_share(layers[k - 1].index, place.ep)
                exchange = sent + ceil(w.routed * share * Fraction(p.ep, p.tp))
            found.append(
                Buffers(
                    # without resharding all weights stay whole from forward to their own backward
                    gathered=gathered[k] if p.reshard else sum(gathered[: k + 1]),
                    prefetched=gathered[k - 1] if p.reshard and k else 0,
                    unreduced=unreduced[k],
                    in_flight=max(unreduced[k : k + 2]),
                    exchange=exchange,
                    hidden=neighbours * w.hidden,
                )
            )
        return found
