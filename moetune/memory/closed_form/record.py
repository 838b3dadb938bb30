"""`Record`: one recorded step of a shortened model, with the bytes of every storage as a monomial of sizes.

A step is recorded at two choices of probe sizes: the monomials are derived from the first, and checked with the second.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations_with_replacement
from math import prod
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from moetune.errors import UserError
from moetune.experts.context import ReadCounts
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
    value_of,
    values_of,
)
from moetune.memory.trace.alike import Stack
from moetune.memory.trace.log import OUTSIDE, Block, Log
from moetune.memory.trace.repeat import Events, Owners
from moetune.memory.trace.steps import Feed, Steps, batches_of
from moetune.parallel.coordinates import token_shares
from moetune.parallel.distribute import micro_steps_are_alike
from moetune.training.step.loss import Chunks

Integers = Annotated[
    np.ndarray,
    PlainValidator(lambda values: np.asarray(values, dtype=np.int64)),
    PlainSerializer(lambda values: values.tolist()),
]
"""An int64 array, which pydantic writes as a list."""


class NoClosedForm(UserError):
    """Raised when a run has no closed form, for instance because a storage's bytes are no product of sizes."""


@dataclass(frozen=True)
class Record:
    """One step of a shortened model (trace/alike.py), with the bytes of each storage as a formula of sizes.

    A block's bytes are coefficient × monomial, and × the tokens of its experts if `experts` is not -1. Arrays have one
    element for each of `log.blocks`: [blocks].

    Attributes:
        log: allocations and releases; the bytes in it are those at the first probe sizes.
        coefficients: [blocks] constant factor of the bytes.
        monomials: [blocks] index in `powers` of the product of sizes.
        powers: the different monomials.
        experts: [blocks] index in `groups` of the experts whose tokens are a factor of the bytes; -1 for none.
        layers: [blocks] decoder layer in which the block is allocated, counted among the layers that ran, from 0; -1
            outside of layers.
        places: [blocks] index in `sizes.PLACES` of the loss's chunk, and block of tokens in it, that allocates it.
        groups: tuples of ids of experts that are computed together.
    """

    log: Log
    coefficients: Integers
    monomials: Integers
    powers: tuple[Powers, ...]
    experts: Integers
    layers: Integers
    places: Integers
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def held_out(self) -> np.ndarray:
        """Whether each block is allocated in the evaluation, and so depends on its batch: [blocks]."""
        return np.array([block.phase == "evaluation" for block in self.log.blocks], dtype=bool)

    def bytes_at(self, sizes: Sizes, rows: ExpertRows, batch: Chunks, held_out: Chunks | None) -> np.ndarray:
        """Return the bytes of each block at given sizes, int64 [blocks]; 0 for what is allocated at a place in the loss
        that does not occur at these sizes.

        `rows` are the tokens of each expert; `batch` and `held_out` the division in the loss of the tokens of a
        micro-batch, and of an evaluation's batch (None without evaluation).
        """
        values = self.coefficients * values_of(self.powers, sizes)[self.monomials]
        for counts, which in ((rows.trained, ~self.held_out), (rows.held_out, self.held_out)):
            grows = which & (self.experts >= 0)
            if grows.any():
                of_groups = [sum(counts[expert] for expert in group) for group in self.groups]
                values[grows] *= np.asarray(of_groups, dtype=np.int64)[self.experts[grows]]
        values[~np.where(self.held_out, places(held_out)[self.places], places(batch)[self.places])] = 0
        return values

    def repeated(self, stack: Stack) -> tuple[Events, np.ndarray]:
        """Expand the record into the allocations and releases of a whole model, the decoder layers of which are those
        of `stack`.

        Returns the events, and [storages] the number of the decoder layer in which each is allocated; -1 outside of
        layers.
        """
        events = Events.of(self.log, range(len(stack.kept)), stack.like)
        return events, np.where(self.layers[events.like] < 0, OUTSIDE, events.layers)

    def on_rank(self, ep: int, other: int, ids: Sequence[Mapping[int, int]]) -> "Record":
        """Return the record of another rank that differs in the ids of its experts only. In its `log` the ids stay
        those of this rank.

        Args:
            ep, other: indices of this rank and of the other on the `ep` axis.
            ids: [layers that ran] id of each expert of this rank -> id of the expert of the other in its place.
        """
        names = {f"{name}{one}": f"{name}{two}" for name in "rq" for one, two in ((ep, other), (other, ep))}
        powers = (tuple(sorted((names.get(name, name), number) for name, number in one)) for one in self.powers)
        groups: dict[tuple[int, int], int] = {}  # (layer, group of this rank) -> group of the other rank
        experts = [
            group if group < 0 else groups.setdefault((layer, group), len(groups))
            for layer, group in zip(self.layers.tolist(), self.experts.tolist(), strict=True)
        ]
        return replace(
            self,
            powers=tuple(powers),
            experts=np.array(experts, dtype=np.int64),
            groups=tuple(tuple(ids[layer][expert] for expert in self.groups[group]) for layer, group in groups),
        )

    def formula(self, block: int) -> str:
        """Return the formula of the bytes of `log.blocks[block]` as text, such as "2·B·S·n"; sizes.py lists the names
        of sizes."""
        exponents = {1: "", 2: "²"}
        powers = self.powers[self.monomials[block]]
        factors = [f"{name}{exponents.get(exponent, f'^{exponent}')}" for name, exponent in powers]
        return "·".join([f"{self.coefficients[block]:,}", *factors, *(["n"] if self.experts[block] >= 0 else [])])


def record(steps: Steps, shape: Shape, length: int, limits: Collection[int] = (), like: Record | None = None) -> Record:
    """Record one step of a shortened model at two choices of probe sizes, and derive the monomials of its storages.

    Args:
        steps: steps of the model, on fake tensors and with all optimizer states created.
        length: tokens of a sequence of that shape, as in the run to predict.
        limits: lengths to which the model's code may compare a sequence's length. If one of them lies between a probe
            length and `length`, the record is also compared with a step at `length`.
        like: record of the same steps with another number of trained experts, with which this one will be compared
            (`Choices.of`). The step is then recorded at one choice of sizes only, and bytes that are constant in `like`
            are taken to be constant where the same operation of the same module allocates them, as are weights and
            their copies from the host, whose number of experts a size of the step may divide by chance.

    Raises:
        NoClosedForm: the steps allocate different storages, or a storage's bytes are no product of sizes.
    """
    own = {size for tensor in steps.adapted.model.parameters() for size in tensor.shape}
    probes = [ProbeSizes.of(shape, own, number) for number in ((0, 1) if like is None else (0,))]
    if like is None and any(one.longer(limits) != shape.longer for one in probes):
        probes.append(probes[0].of_length(length, shape))
    (log, sizes, rows, where), *others = (_recorded(steps, one) for one in probes)
    if like is None and any(one == two > 0 for one, two in zip(rows.trained, others[0][2].trained, strict=True)):
        raise NoClosedForm("experts receive too few tokens; use --method trace")
    for other, *_ in others:
        _refuse_other_storages(log, other)
    names = Monomials(sizes)
    found = [names.of(block.bytes, rows.of(block)) for block in log.blocks]
    elsewhere = [of_probe for _, of_probe, *_ in others]
    # Some sizes of the loss's chunks can be equal at all probes: equal bytes do not show that a monomial is wrong.
    varying = {
        power
        for power in {power for *_, power in found}
        if any(value_of(power, of_probe) != value_of(power, sizes) for of_probe in elsewhere)
    }
    for at, (block, *same) in enumerate(zip(log.blocks, *(other.blocks for other, *_ in others), strict=True)):
        _, grows, power = found[at]
        is_suspect = grows or power in varying or block.fetched
        if same and is_suspect and all(one.bytes == block.bytes for one in same):
            found[at] = (block.bytes, False, ())  # constant, although a probe size divides it
    if like is not None:
        is_constant = np.array([not powers for powers in like.powers])[like.monomials] & (like.experts < 0)
        constants = {
            (block.op, block.module, block.bytes)
            for block, constant in zip(like.log.blocks, is_constant.tolist(), strict=True)
            if constant
        }
        found = [
            (b.bytes, False, ()) if _is_weight(b) or (b.op, b.module, b.bytes) in constants else of
            for b, of in zip(log.blocks, found, strict=True)
        ]
    if like is None:
        other, other_sizes, other_rows, _ = others[0]
        found = _of_both(log, other, found, (rows, sizes), (other_rows, other_sizes))
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


def _is_weight(block: Block) -> bool:
    """Return whether a block is loaded, or is a copy from the host of what was. Inputs of layers are copied from there
    too (`train.checkpointing: offload`)."""
    return block.phase == "load" or (block.fetched and block.part in ("frozen_weights", "trainable_weights"))


def _refuse_other_storages(log: Log, other: Log) -> None:
    """Raise `NoClosedForm` if two logs differ in the order of their allocations and releases."""
    if log.entries != other.entries:
        pairs = enumerate(zip(log.entries, other.entries, strict=False))
        at = next((n for n, pair in pairs if pair[0] != pair[1]), min(len(log.entries), len(other.entries)) - 1)
        block = log.blocks[log.entries[at] if log.entries[at] >= 0 else ~log.entries[at]]
        raise NoClosedForm(
            f"the step allocates different storages at different sizes, first in {block.op} of {block.module!r}; "
            "use --method trace"
        )


_DEGREES = 4
"""Number of degrees of a monomial that `_of_both` tries, from 0."""
_Found: TypeAlias = tuple[int, bool, Powers]
"""Bytes of a block: coefficient, whether it is multiplied by its experts' tokens, and monomial."""


def _of_both(
    log: Log, other: Log, found: list[_Found], at: tuple[ExpertRows, Sizes], there: tuple[ExpertRows, Sizes]
) -> list[_Found]:
    """Return `found`, the bytes of each block of `log`, with those replaced that the step of `other` contradicts: a
    size may divide a coefficient by chance. They become the monomial of lowest degree with equal coefficients in both
    steps; they stay if there is none.

    Args:
        at, there: tokens of each expert, and sizes, of the steps of `log` and of `other`.
    """
    names, replaced = [name for _, name in Monomials(at[1]).values], list(found)
    powers = [power for degree in range(_DEGREES) for power in combinations_with_replacement(names, degree)]
    values = [[prod(sizes[name] for name in power) for power in powers] for _, sizes in (at, there)]

    @cache
    def explaining(mine: int, rows: int, its: int, its_rows: int) -> _Found | None:
        for power, value, its_value in zip(powers, *values, strict=True):
            for many, its_many in ((1, 1), (rows, its_rows)):
                whole, its_whole = value * many, its_value * its_many
                if whole and mine % whole == 0 and mine * its_whole == its * whole:
                    return mine // whole, many > 1, tuple(sorted(Counter(power).items()))
        return None

    for number, (block, same) in enumerate(zip(log.blocks, other.blocks, strict=True)):
        coefficient, grows, power = found[number]
        rows, its_rows = at[0].of(block), there[0].of(same)
        if coefficient * value_of(power, there[1]) * (its_rows if grows else 1) != same.bytes:
            replaced[number] = explaining(block.bytes, rows, same.bytes, its_rows) or found[number]
    return replaced


def _compare(log: Log, other: Log, found: Sequence[_Found], values: Mapping[Powers, int], rows: ExpertRows) -> None:
    """Raise `NoClosedForm` if the bytes of `other`, the log of a step at other sizes, differ from those of the
    monomials.

    Args:
        found: for each block its coefficient, whether it is multiplied by its experts' tokens, and its monomial.
        values: monomial -> its value at the other sizes.
        rows: tokens of each expert at the other sizes.
    """
    for block, is_, (coefficient, grows, power) in zip(log.blocks, other.blocks, found, strict=True):
        if is_.bytes != coefficient * values[power] * (rows.of(is_) if grows else 1):
            raise NoClosedForm(
                f"{block.op} in {block.module or 'no module'} ({block.phase}) allocates {block.bytes:,} bytes at one "
                f"size and {is_.bytes:,} at another, which is no product of sizes; use --method trace"
            )


def _recorded(steps: Steps, probe: ProbeSizes) -> tuple[Log, Sizes, ExpertRows, np.ndarray]:
    """Run a step at probe sizes; return its log, its sizes, the tokens of its experts, and [blocks] each block's place
    in the loss, as an index in `PLACES`. Raises `NoClosedForm` if a block outlives its place."""
    config, adapted = steps.config, steps.adapted
    shares, moe = token_shares(config.parallel), adapted.structure.moe_layers
    top_k, experts = (moe[0].top_k, moe[0].shape.num_experts) if moe else (1, 1)

    def count(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        return probe.count(ids.numel(), num_experts, top_k, shares)

    tracker = steps.tracker()
    batch, held_out = (
        NotedChunks(chunks.tokens, chunks.size, chunks.block, tracker.place)
        for chunks in (probe.batch, probe.held_out or probe.batch)
    )
    held_out_rows = probe.held_out_rows if probe.held_out is not None else 0
    feed = Feed(batches_of(adapted, probe.sequence), probe.rows, held_out_rows, batch, held_out)
    with steps.counting(count):
        if micro_steps_are_alike(config.parallel):  # the last micro-step, which adds to existing gradients
            micro_steps = min(2, config.train.accumulate)
            log = steps.record(tracker, feed, micro_steps, begun=micro_steps - 1)
        else:  # first, last and middle micro-steps communicate differently
            log = steps.record(tracker, feed, min(3, config.train.accumulate))
    rows = ExpertRows(
        *(
            () if chunks is None else tuple(probe.count(chunks.tokens * top_k // shares, experts, top_k, shares))
            for chunks in (probe.batch, probe.held_out)
        )
    )
    placed = next(iter(adapted.run.placement.values()), ())
    return log, probe.sizes() | exchanged(placed, rows), rows, _places_of(log, batch, held_out)


def _places_of(log: Log, batch: NotedChunks, held_out: NotedChunks) -> np.ndarray:
    """Return where in the loss each block is allocated: [blocks] indices in `PLACES`.

    Where a place does not occur in the loss of a run, `Record.bytes_at` sets its blocks to 0 bytes. Raises
    `NoClosedForm` if a block is not freed in the chunk and block of the loss that allocated it.
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
            raise NoClosedForm(
                f"the result of {dead.op} in {dead.module!r} outlives the chunk of the loss that allocates it; "
                "use --method trace"
            )
    return np.array(made, dtype=np.int64)
