"""What FSDP2 makes of a rank's quantities, as parallel/distribute.py sets it up (`engine: fsdp2`).

Groups of parameters are gathered and reduced together: the embedding if it is no head, each decoder layer, the experts
of a layer where ranks share the same ones, the final norm. Torch pads each parameter to whole rows a rank. All other
parameters are whole on every rank, and their gradients are added up one by one.

Buffers are those of torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: a gather's output is copied out into
parameters, gradients are copied into a reduce-scatter's input, which waits for the next group's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import NamedTuple

from moetune.config import ParallelConfig
from moetune.memory.collectives import part, ring
from moetune.memory.quantities import Layer, Matrix, Quantities, Tensors, Transient, total
from moetune.memory.report import Collective
from moetune.parallel.place import Place, data_ranks, expert_copies, expert_shards


@dataclass(frozen=True)
class Buffers:
    """What communication holds on the device while one layer runs backward, in bytes.

    Attributes:
        gathered: sharded weights that are whole then.
        prefetched: those of the layer whose turn is next, as they are gathered.
        unreduced: the layer's gradients, whole until they are reduced or leave for the host.
        in_flight: a copy of them, or those of the layer before, on their way.
        hidden: activations that arrive from neighbouring pipeline stages.
    """

    gathered: int = 0
    prefetched: int = 0
    unreduced: int = 0
    in_flight: int = 0
    hidden: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


class Group(NamedTuple):
    """Parameters that `ranks` ranks share, and `copies` such groups of ranks hold."""

    axis: str
    ranks: int
    copies: int
    matrices: tuple[Matrix, ...]

    @property
    def whole(self) -> int:
        """Bytes once gathered."""
        return self.ranks * self.shard

    @property
    def shard(self) -> int:
        return sum(matrix.part(self.ranks) for matrix in self.matrices)

    @property
    def reduced(self) -> int:
        """Bytes of gradients that are reduced, before they are."""
        return self.ranks * sum(matrix.part(self.ranks) for matrix in self.matrices if matrix.trains)

    def kept(self, tensors: Tensors, index: int) -> Tensors:
        """What a rank keeps of tensors of which these matrices are a part; all that trains is in them."""
        n, trained = self.ranks, [matrix for matrix in self.matrices if matrix.trains]
        frozen = sum(matrix.part(n) - matrix.bytes for matrix in self.matrices if not matrix.trains)
        weights = sum(matrix.part(n) for matrix in trained)
        cut = {name: part(getattr(tensors, name), n, index) for name in ("states", "master", "numel", "update")}
        gradients = weights if tensors.gradients else 0
        return replace(tensors, frozen=tensors.frozen + frozen, trainable=weights, gradients=gradients, **cut)


class LayerGroups(NamedTuple):
    """Of a decoder layer: `experts` is None where its experts are whole, or shared with the rest of it."""

    rest: Group
    experts: Group | None

    @property
    def all(self) -> tuple[Group, ...]:
        return (self.rest,) if self.experts is None else (self.experts, self.rest)


@dataclass(frozen=True)
class Sharded:
    """A rank under FSDP2.

    Attributes:
        q: its layers with its heads and experts, whole.
        place: which shard of them is its own.
    """

    q: Quantities
    parallel: ParallelConfig
    place: Place

    # --- Groups -------------------------------------------------------------------------------------------------

    def _dense(self, matrices: tuple[Matrix, ...]) -> Group:
        return Group("fsdp", self.parallel.fsdp, self.parallel.replicate, matrices)

    @property
    def table(self) -> Group:
        return self._dense(() if self.q.tied else self.q.table)

    @property
    def norm(self) -> Group:
        return self._dense(self.q.norm)

    def layer(self, layer: Layer) -> LayerGroups:
        if layer.exchange is None:
            return LayerGroups(self._dense(layer.matrices + layer.bank), None)
        shards = expert_shards(self.parallel)
        experts = (
            Group("efsdp", shards, expert_copies(self.parallel), layer.bank) if shards > 1 and layer.bank else None
        )
        return LayerGroups(self._dense(layer.matrices), experts)

    @property
    def groups(self) -> list[Group]:
        """In the order of forward; the final norm last."""
        layers = [group for layer in self.q.layers for group in self.layer(layer).all]
        return [group for group in (self.table, *layers, self.norm) if group.matrices]

    # --- What it sends ------------------------------------------------------------------------------------------

    def collectives(self) -> Iterator[Collective]:
        p, steps = self.parallel, self.q.accumulate
        if p.fsdp > 1:
            for axis in ("fsdp", "efsdp"):
                groups = [group for group in self.groups if group.axis == axis]
                for ranks in {group.ranks for group in groups}:
                    sizes = [g.whole for g in groups]
                    if p.zero == 3 and p.reshard:  # the final norm stays; a frozen embedding is gathered all the same
                        sizes += [g.whole for g in groups if g.matrices is not self.q.norm]
                    yield ring("all-gather", axis, "weights", sizes, ranks, steps if p.zero == 3 else 1)
                    reduced = [g.reduced for g in groups]
                    yield ring("reduce-scatter", axis, "gradients", reduced, ranks, 1 if p.zero == 1 else steps)
                copied = [g.reduced // g.ranks for g in groups if g.copies > 1]
                for copies in {g.copies for g in groups if g.copies > 1}:
                    yield ring("all-reduce", "replicate", "gradients", copied, copies)
        dense, experts = self._whole()
        axis = "fsdp" if p.replicate == 1 else "replicate" if p.fsdp == 1 else "data"
        if data_ranks(p) > 1:
            yield ring("all-reduce", axis, "gradients of what is whole", (m.bytes for m in dense), data_ranks(p))
        if expert_copies(p) > 1:
            sizes = (m.bytes for m in experts)
            yield ring("all-reduce", "replicate", "gradients of whole experts", sizes, expert_copies(p))
        yield ring("all-reduce", self._world(axis), "norm and loss", [8], p.ranks)

    def _whole(self) -> tuple[list[Matrix], list[Matrix]]:
        """What trains and no group has: (the rest, experts that are spread)."""
        q, is_sharded = self.q, self.parallel.fsdp > 1
        rest = [*q.tail, *(q.table if q.tied or not is_sharded else ()), *(() if is_sharded else q.norm)]
        experts: list[Matrix] = []
        for layer in q.layers:
            if not is_sharded:
                rest += layer.matrices if layer.exchange is not None else layer.matrices + layer.bank
            if layer.exchange is not None and (not is_sharded or self.layer(layer).experts is None):
                experts += layer.bank
        return [matrix for matrix in rest if matrix.trains], experts

    def _world(self, data_axis: str) -> str:
        """The name of the group of all ranks: torch has one where an axis is all of them."""
        p = self.parallel
        if p.tp == p.ranks:
            return "tp"
        return data_axis if data_ranks(p) == p.ranks else "ep" if p.ep == p.ranks else "all"

    # --- What it holds ------------------------------------------------------------------------------------------

    def quantities(self) -> Quantities:
        """With buffers among transients, the loss and the embedding's backward."""
        q, p = self.q, self.parallel
        if p.fsdp == 1:
            return q
        layers = tuple(self._layer(k) for k in range(len(q.layers)))
        table = self.table
        always = self._gathered(len(q.layers)) if self._keeps else self.norm.whole
        waiting = self._unreduced_before(len(q.layers) + 1)
        embedding = self._gathered(-1) + 2 * table.reduced if table.reduced else 0
        return replace(
            q,
            embedding=table.kept(q.embedding, self.place.fsdp) if table.matrices else q.embedding,
            layers=layers,
            loss=q.loss + always + waiting,
            embedding_backward=q.embedding_backward + embedding,
        )

    @property
    def _keeps(self) -> bool:
        """Whether weights stay gathered from forward to backward."""
        return self.parallel.zero < 3 or not self.parallel.reshard

    @property
    def _keeps_gradients(self) -> bool:
        """Whether gradients stay whole until a step's last micro-step."""
        return self.parallel.zero == 1 and self.q.accumulate > 1

    def _gathered(self, k: int, *, last: bool = False) -> int:
        """Weights that are whole when layer k (-1: the embedding) runs backward, final norm included.

        Args:
            last: in a step's last micro-step; else whichever has most.
        """
        layers = self.q.layers
        if not self._keeps:
            own = sum(g.whole for g in self.layer(layers[k]).all) if 0 <= k < len(layers) else 0
            return own + self.norm.whole + (self.table.whole if k < 0 else 0)
        sizes = [sum(group.whole for group in self.layer(layer).all) for layer in layers]
        always, below = self.table.whole + self.norm.whole, sum(sizes[: k + 1])
        if last or self.parallel.zero == 3 or self.q.accumulate == 1:
            return always + below
        return always + (sum(sizes) if self.q.accumulate > 2 else max(below, sum(sizes) - self._only_in_second(k)))

    def _only_in_second(self, k: int) -> int:
        """Gradients that are there at layer k of the second micro-step and not of the first."""
        of_layers = [self.layer(layer).all for layer in self.q.layers]
        before = [self.table, *chain.from_iterable(of_layers[: k + 1])]
        if not self._keeps_gradients:
            return sum(group.reduced // group.ranks for group in before)
        after = chain.from_iterable(of_layers[k + 1 :])
        return sum(g.reduced for g in before) - sum(g.reduced - g.reduced // g.ranks for g in after)

    def _unreduced_before(self, k: int, *, last: bool = False) -> int:
        """Under ZeRO-1, what gradients of layers before the k-th take more while they are whole; of all layers, where
        neither the first nor the last micro-step has most."""
        if not self._keeps_gradients:
            return 0
        layers = self.q.layers[: k if last or self.q.accumulate == 2 else None]
        groups = [group for layer in layers for group in self.layer(layer).all]
        return sum(group.reduced - group.reduced // group.ranks for group in [self.table, *groups])

    def _layer(self, k: int) -> Layer:
        layer = self.q.layers[k]
        groups, bank = self.layer(layer), total(layer.experts)
        if layer.exchange is None:  # one group of both: what is frozen of the experts is whole, and counts as theirs
            experts = Tensors(frozen=bank.frozen, packed=bank.packed, frozen_numel=bank.frozen_numel, host=bank.host)
            both = groups.rest.kept(layer.dense + bank, self.place.fsdp)
            dense = replace(both, **{f.name: getattr(both, f.name) - getattr(experts, f.name) for f in fields(experts)})
        else:
            dense = groups.rest.kept(layer.dense, self.place.fsdp)
            experts = bank if groups.experts is None else groups.experts.kept(bank, self.place.shard)
        own = dense.gradients + experts.gradients
        alone = bank.gradients if groups.experts is None and layer.exchange is not None else 0
        transients: list[Transient] = []
        for moment in layer.transients:
            made = round(moment.gradients * layer.tensors.gradients)
            in_bank = min(made, bank.gradients) if layer.exchange is not None else 0
            buffers = self.buffers(k, in_experts="experts" in moment.name)
            unreduced = made - in_bank + (in_bank if groups.experts is not None and "experts" in moment.name else 0)
            transients.append(
                replace(
                    moment,
                    dense=moment.dense + replace(buffers, unreduced=unreduced).total + self._unreduced_before(k + 1),
                    gradients=min(in_bank, alone) / own if own else 0.0,
                )
            )
        return replace(
            layer,
            dense=dense,
            experts=(experts,) if layer.experts else (),
            transients=(*transients, *self._reductions(k, own), *self._copies(k)),
        )

    def buffers(self, k: int, *, in_experts: bool, last: bool = False) -> Buffers:
        """While layer k runs backward. Experts with a group of their own are whole until theirs is through."""
        layers = self.q.layers
        groups = self.layer(layers[k])
        gathered = self._gathered(k, last=last)
        if not self._keeps and groups.experts is not None and not in_experts:
            gathered -= groups.experts.whole
        before = self.layer(layers[k - 1]).rest if k else self.table
        in_flight = self.layer(layers[k + 1]).rest.reduced if k + 1 < len(layers) else 0
        if groups.experts is not None and not in_experts:
            in_flight = groups.experts.reduced
        unreduced = groups.rest.reduced if groups.experts is None or not in_experts else groups.experts.reduced
        return Buffers(
            gathered=gathered,
            prefetched=0 if self._keeps else before.whole,
            unreduced=0 if self._keeps_gradients else unreduced,
            in_flight=0 if self._keeps_gradients else in_flight,
        )

    def _reductions(self, k: int, own: int) -> Iterator[Transient]:
        """The moments at which gradients of a group, whole, and the copy that is reduced are there."""
        layer, p = self.q.layers[k], self.parallel
        groups = self.layer(layer)
        fullest = max((m.dense for m in layer.transients if m.name == "experts"), default=0)
        stays = p.zero == 2 and self.q.accumulate > 1  # else its weights are let go of first
        for group in groups.all:
            if not group.reduced:
                continue
            is_rest = group is groups.rest
            buffers = self.buffers(k, in_experts=not is_rest, last=p.zero == 1)
            taken = buffers.gathered + buffers.prefetched - (0 if stays else group.whole) + 2 * group.reduced
            yield Transient(
                "its gradients reduced" if is_rest else "experts' gradients reduced",
                taken + self._unreduced_before(k, last=True) + (self.q.hidden if is_rest else fullest),
                gradients=1.0 if is_rest and self.q.accumulate == 1 else group.reduced / group.ranks / own,
            )

    def _copies(self, k: int) -> Iterator[Transient]:
        """The moments at which a gather's output and the copy of it are both there, if those may be the fullest: of the
        embedding, whose weights are gathered for backward even if they are frozen; and, where all that is gathered
        stays, of each layer in forward."""
        layers = self.q.layers
        if not self._keeps:
            if k == 0 and self.table.matrices:
                taken = 2 * self.table.whole + self.norm.whole + self.layer(layers[k]).rest.reduced + self.q.hidden
                yield Transient("embedding gathered", taken, gradients=0.0 if self.q.accumulate > 1 else 1.0)
            return
        sizes = [self.norm.whole, self.table.whole]
        fullest = 0
        for layer in layers[: k + 1]:
            for group in reversed(self.layer(layer).all):
                fullest = max(fullest, sum(sizes) + sizes[-1] + group.whole)  # a copy goes when the next is gathered
                sizes.append(group.whole)
        fullest = max(fullest, sum(sizes) + sizes[-1])
        counted = layers[k + 1 :] if self.q.accumulate == 1 else layers if self.parallel.zero < 3 else ()
        not_yet = sum(group.reduced // group.ranks for layer in counted for group in self.layer(layer).all)
        yield Transient("forward, gathered", fullest - not_yet, gradients=0.0)


def largest(sharded: Sharded) -> Buffers:
    """Those of the layer that needs most; none where nothing is sharded."""
    if sharded.parallel.fsdp == 1:
        return Buffers()
    found: Iterable[Buffers] = (sharded.buffers(k, in_experts=True) for k in range(len(sharded.q.layers)))
    return max(found, key=lambda buffers: buffers.total, default=Buffers())
