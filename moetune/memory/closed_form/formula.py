"""A record becomes a number: bytes at any sizes, by arithmetic alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moetune.memory.allocator import SMALLEST_BLOCK
from moetune.memory.closed_form.record import NoClosedForm, Record, Rows
from moetune.memory.closed_form.sizes import Sizes, places, values_of
from moetune.memory.report import PART_NAMES, Parts
from moetune.memory.trace.alike import Shortened, Unit
from moetune.memory.trace.log import OUTSIDE, Mark
from moetune.memory.trace.repeat import Order
from moetune.training.step.loss import Chunks


@dataclass(frozen=True)
class Events:
    """A record's log, repeated for all layers.

    Attributes:
        blocks: [storages] the block of the record that each is like.
        layers: [storages] the decoder layer that is at work when it is born; -1 outside of layers.
        storages: [events] which one is born or dies.
        signs: [events] 1 or -1.
        marks: phases, and the events that they begin at.
    """

    blocks: np.ndarray
    layers: np.ndarray
    storages: np.ndarray
    signs: np.ndarray
    marks: tuple[tuple[int, Mark], ...]

    @classmethod
    def of(cls, record: Record, short: Shortened) -> Events:
        """For the layers that those of the shortened model stand for."""
        place = {layer: number for number, layer in enumerate(short.kept)}  # as the record numbers layers
        stands_for = [[layer] for layer in (*short.kept, OUTSIDE)]
        units = []
        for unit in short.units:
            first = tuple(place[layer] for layer in unit.layers)
            units.append(Unit((first, *unit.copies[1:])))
            for number, *like in zip(first, *unit.copies, strict=True):
                stands_for[number] = like
        order = Order.of(record.log, Shortened(short.run, tuple(place.values()), tuple(units)))
        layers = [stands_for[number] for number in record.layers.tolist()]
        storages = zip(order.blocks, order.copies, strict=True)
        entries = np.array(order.entries, dtype=np.int64)
        return cls(
            np.array(order.blocks, dtype=np.int64),
            np.array([layers[number][copy % len(layers[number])] for number, copy in storages], dtype=np.int64),
            np.where(entries >= 0, entries, ~entries),
            np.where(entries >= 0, 1, -1),
            tuple((at, mark) for mark, at, *_ in order.marks),
        )


@dataclass(frozen=True)
class Peak:
    """The fullest moment.

    Attributes:
        blocks, values: [alive] of each storage that is alive then the block of the record that it is like, and bytes.
        total: the bytes of those on the device.
        rounded: the most that is alive at once where each size is rounded up as the allocator does, which may be at
            another moment.
        host: the most that is on the host at once.
    """

    mark: Mark
    blocks: np.ndarray
    values: np.ndarray
    total: int
    rounded: int
    host: int


def evaluate(
    record: Record,
    events: Events,
    sizes: Sequence[Sizes],
    rows: Sequence[Rows],
    of_layer: Mapping[int, int],
    batch: Chunks,
    held_out: Chunks | None,
) -> Peak:
    """The peak at these sizes.

    Args:
        sizes, rows: of layers whose experts receive the same.
        of_layer: numbers of these, by decoder layer; 0 for all others.
        batch, held_out: how the loss divides its tokens.

    Raises:
        NoClosedForm: what layers' experts receive counts outside of these layers.
    """
    table = np.stack([_values(record, *both, batch, held_out) for both in zip(sizes, rows, strict=True)])
    if ((table != table[0]).any(0) & (record.layers < 0)).any():
        raise NoClosedForm("layers whose experts receive unlike numbers of tokens have a tensor together")
    numbers = np.zeros(max([*of_layer, *events.layers.tolist()], default=0) + 2, dtype=np.int64)
    numbers[list(of_layer)] = list(of_layer.values())
    values = table[numbers[events.layers], events.blocks]
    on_host = record.on_host[events.blocks]
    here = np.where(on_host, 0, values)

    def alive(bytes_of: np.ndarray) -> np.ndarray:
        return np.cumsum(events.signs * bytes_of[events.storages])

    device = alive(here)
    at = int(np.argmax(device))
    there = np.zeros(len(values), dtype=bool)
    until, born = events.storages[: at + 1], events.signs[: at + 1] > 0
    there[until[born]] = True
    there[until[~born]] = False
    mark = events.marks[bisect_right(events.marks, at, key=lambda one: one[0]) - 1][1]
    rounded = int(alive(-(-here // SMALLEST_BLOCK) * SMALLEST_BLOCK).max())
    host = max(0, int(alive(np.where(on_host, values, 0)).max()))
    return Peak(mark, events.blocks[there], values[there], int(device[at]), rounded, host)


def _values(record: Record, sizes: Sizes, rows: Rows, batch: Chunks, held_out: Chunks | None) -> np.ndarray:
    """[blocks] bytes."""
    values = record.coefficients * values_of(record.powers, sizes)[record.monomials]
    for counts, which in ((rows.trained, ~record.held_out), (rows.held_out, record.held_out)):
        goes = which & (record.experts >= 0)
        if goes.any():
            of_groups = [sum(counts[expert] for expert in group) for group in record.groups]
            values[goes] *= np.asarray(of_groups, dtype=np.int64)[record.experts[goes]]
    values[~np.where(record.held_out, places(held_out)[record.places], places(batch)[record.places])] = 0
    return values


def parts_of(record: Record, peak: Peak) -> Parts:
    """The bytes at the peak, by part."""
    sums = dict.fromkeys(PART_NAMES, 0)
    taken = np.bincount(peak.blocks, weights=peak.values, minlength=len(record.log.blocks))  # exact below 2^53
    for block, size in zip(record.log.blocks, taken.tolist(), strict=True):
        if size and not block.on_host:
            sums[block.part] += int(size)
    return Parts(**sums)
