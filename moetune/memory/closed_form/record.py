"""One step of a shortened model, recorded at probe sizes: every storage, as a monomial of the sizes.

A record is made twice, at different sizes. The first gives the monomials; the second, which was not used for them, must
be what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from moetune.errors import UserError
from moetune.memory.closed_form.probe import ProbeSizes
from moetune.memory.closed_form.sizes import (
    PLACES,
    ExpertRows,
    Monomials,
    NotedChunks,
    Powers,
    Shape,
    Sizes,
    exchanged,
    places,
    values_of,
)
from moetune.memory.trace.alike import Shortened, Unit
from moetune.memory.trace.log import OUTSIDE, Log
from moetune.memory.trace.repeat import Events, Owners
from moetune.memory.trace.steps import Feed, Steps, batches_of
from moetune.training.step.loss import Chunks


class NoClosedForm(UserError):
    """A storage of the step is no product of sizes that are known."""


@dataclass(frozen=True)
class Record:
    """One step of a shortened model.

    Attributes:
        log: every storage and its order, at the first of the probe sizes.
        coefficients: [blocks] bytes are this times the monomial, and times the rows of `experts`.
        monomials: [blocks] numbers into `powers`.
        experts: [blocks] numbers into `groups`, with whose rows the bytes grow; -1 for none.
        layers: [blocks] the decoder layer, of those that are run, that was at work; -1 outside of layers.
        places: [blocks] numbers into `sizes.PLACES`: where in the loops of the loss they are made.
        groups: experts whose rows are computed together.
    """

    log: Log
    coefficients: np.ndarray
    monomials: np.ndarray
    powers: tuple[Powers, ...]
    experts: np.ndarray
    layers: np.ndarray
    places: np.ndarray
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def held_out(self) -> np.ndarray:
        """[blocks] whether their rows are those of a held-out batch."""
        return np.array([block.phase == "evaluation" for block in self.log.blocks], dtype=bool)

    def bytes_at(self, sizes: Sizes, rows: ExpertRows, batch: Chunks, held_out: Chunks | None) -> np.ndarray:
        """[blocks] bytes at these sizes.

        Args:
            rows: of each expert.
            batch, held_out: how the loss divides its tokens.
        """
        values = self.coefficients * values_of(self.powers, sizes)[self.monomials]
        for counts, which in ((rows.trained, ~self.held_out), (rows.held_out, self.held_out)):
            grows = which & (self.experts >= 0)
            if grows.any():
                of_groups = [sum(counts[expert] for expert in group) for group in self.groups]
                values[grows] *= np.asarray(of_groups, dtype=np.int64)[self.experts[grows]]
        values[~np.where(self.held_out, places(held_out)[self.places], places(batch)[self.places])] = 0
        return values

    def repeated(self, short: Shortened) -> tuple[Events, np.ndarray]:
        """The events of the layers that those of the shortened model stand for, and [storages] the decoder layer that
        is at work when each storage is born; -1 outside of layers."""
        place = {layer: number for number, layer in enumerate(short.kept)}  # as the record numbers layers
        stands_for = {number: [layer] for layer, number in place.items()} | {OUTSIDE: [OUTSIDE]}
        units = []
        for unit in short.units:
            first = tuple(place[layer] for layer in unit.layers)
            units.append(Unit((first, *unit.copies[1:])))
            stands_for |= {number: list(like) for number, *like in zip(first, *unit.copies, strict=True)}
        events = Events.of(self.log, Shortened(short.run, tuple(place.values()), tuple(units)))
        table = np.full((len(place) + 1, int(events.copies.max(initial=0)) + 1), OUTSIDE, dtype=np.int64)
        for number, layers in stands_for.items():
            table[number] = np.resize(layers, table.shape[1])
        return events, table[self.layers[events.like], events.copies]

    def formula(self, block: int) -> str:
        """The bytes of a block in words, as in `2·B·S·n`."""
        exponents = {1: "", 2: "²"}
        powers = self.powers[self.monomials[block]]
        factors = [f"{name}{exponents.get(exponent, f'^{exponent}')}" for name, exponent in powers]
        return "·".join([f"{self.coefficients[block]:,}", *factors, *(["n"] if self.experts[block] >= 0 else [])])


def record(steps: Steps, shape: Shape, length: int, limits: Collection[int] = ()) -> Record:
    """Record one step of a shortened model.

    Args:
        steps: of that model, its optimizer's states made.
        shape: what the batches are to be like.
        length: of a sequence of that shape.
        limits: numbers that a length may be compared with. Where probe lengths are not on the same side of all of
            them as this one, the record is compared with a step of this length too.

    Raises:
        NoClosedForm: a storage is no product of sizes.
    """
    if not steps.adapted.ranks.is_single:
        _recorded(steps, ProbeSizes.of(shape, (), 2))  # FSDP2 makes in its first step what it keeps
    own = {size for tensor in steps.adapted.model.parameters() for size in tensor.shape}
    probes = [ProbeSizes.of(shape, own, number) for number in (0, 1)]
    if any(one.longer(limits) != shape.longer for one in probes):
        probes.append(probes[0].of_length(length, shape))
    (log, sizes, rows, where), *others = (_recorded(steps, one) for one in probes)
    for other, *_ in others:
        _refuse_other_storages(log, other)
    names = Monomials(sizes)
    found = [names.of(block.bytes, rows.of(block)) for block in log.blocks]
    for at, (block, *elsewhere) in enumerate(zip(log.blocks, *(other.blocks for other, *_ in others), strict=True)):
        if all(one.bytes == block.bytes for one in elsewhere):  # constant, even if a probe size divides it
            found[at] = (block.bytes, False, ())
    powers = list(dict.fromkeys(power for *_, power in found))
    numbers = {power: number for number, power in enumerate(powers)}
    for other, other_sizes, other_rows, _ in others:
        _compare(log, other, found, dict(zip(powers, values_of(powers, other_sizes).tolist(), strict=True)), other_rows)
    groups = list(dict.fromkeys(block.experts for block in log.blocks if block.experts))
    of_group = {group: number for number, group in enumerate(groups)}
    return Record(
        log,
        coefficients=np.array([coefficient for coefficient, *_ in found], dtype=np.int64),
        monomials=np.array([numbers[power] for *_, power in found], dtype=np.int64),
        powers=tuple(powers),
        experts=np.array(
            [of_group[block.experts] if grows else -1 for block, (_, grows, _) in zip(log.blocks, found, strict=True)],
            dtype=np.int64,
        ),
        layers=Owners(log, list(steps.layers)).born,
        places=where,
        groups=tuple(groups),
    )


def _refuse_other_storages(log: Log, other: Log) -> None:
    """Raise `NoClosedForm` if a step at other sizes makes other storages, or in another order."""
    if log.entries != other.entries:
        pairs = enumerate(zip(log.entries, other.entries, strict=False))
        at = next((n for n, pair in pairs if pair[0] != pair[1]), min(len(log.entries), len(other.entries)) - 1)
        block = log.blocks[log.entries[at] if log.entries[at] >= 0 else ~log.entries[at]]
        raise NoClosedForm(f"the step makes other storages at another size, from {block.op} in {block.module!r} on")


def _compare(
    log: Log, other: Log, found: Sequence[tuple[int, bool, Powers]], values: Mapping[Powers, int], rows: ExpertRows
) -> None:
    """Refuse a record that is not what a step at other sizes is.

    Args:
        found: of each block its coefficient, whether it grows with rows, and its monomial.
        values: the monomials at the other sizes.
    """
    for block, is_, (coefficient, grows, power) in zip(log.blocks, other.blocks, found, strict=True):
        if is_.bytes != coefficient * values[power] * (rows.of(is_) if grows else 1):
            raise NoClosedForm(
                f"{block.op} in {block.module or 'no module'} ({block.phase}) makes {block.bytes:,} bytes at one size "
                f"and {is_.bytes:,} at another: not a product of sizes"
            )


def _recorded(steps: Steps, probe: ProbeSizes) -> tuple[Log, Sizes, ExpertRows, np.ndarray]:
    """The log of a step, its sizes, what experts received, and the places of its blocks."""
    config, adapted = steps.config, steps.adapted
    tp, moe = config.parallel.tp, adapted.structure.moe_layers
    top_k, experts = (moe[0].top_k, moe[0].shape.num_experts) if moe else (1, 1)

    def count(layer: int, ids: Tensor, num_experts: int) -> list[int]:
        return probe.count(ids.numel(), num_experts, top_k, tp)

    tracker = steps.tracker()
    batch, held_out = (
        NotedChunks(chunks.tokens, chunks.size, chunks.block, tracker.place)
        for chunks in (probe.batch, probe.held_out or probe.batch)
    )
    held_out_rows = probe.held_out_rows if probe.held_out is not None else 0
    feed = Feed(batches_of(adapted, probe.sequence), probe.rows, held_out_rows, batch, held_out)
    with steps.counting(count):
        if adapted.ranks.is_single:  # the last one, which adds to the gradients of those before it
            micro_steps = min(2, config.train.accumulate)
            log = steps.record(tracker, feed, micro_steps, begun=micro_steps - 1)
        else:  # the first one and the last send other things than those between
            log = steps.record(tracker, feed, min(3, config.train.accumulate))
    rows = ExpertRows(
        *(
            () if chunks is None else tuple(probe.count(chunks.tokens * top_k // tp, experts, top_k, tp))
            for chunks in (probe.batch, probe.held_out)
        )
    )
    return log, probe.sizes() | exchanged(adapted.run, rows), rows, _places_of(log, batch, held_out)


def _places_of(log: Log, batch: NotedChunks, held_out: NotedChunks) -> np.ndarray:
    """Where each block is made. A place that a division of the loss leaves out takes its blocks with it.

    Raises:
        NoClosedForm: a block that is made elsewhere dies in such a place.
    """
    chunks = [held_out if block.phase == "evaluation" else batch for block in log.blocks]
    made = [of.place(block.born) for of, block in zip(chunks, log.blocks, strict=True)]
    for at, entry in enumerate(log.entries):
        if entry >= 0:
            continue
        chunk, block = PLACES[chunks[~entry].place(at)]
        its_chunk, its_block = PLACES[made[~entry]]
        if (chunk in ("middle", "last") and chunk != its_chunk) or (block == "full" and block != its_block):
            dead = log.blocks[~entry]
            raise NoClosedForm(f"{dead.op} in {dead.module!r} is freed in another chunk of the loss than it is made in")
    return np.array(made, dtype=np.int64)
