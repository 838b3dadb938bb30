"""A record becomes a number: bytes at any sizes, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetune.memory.allocator import SMALLEST_BLOCK
from moetune.memory.closed_form.record import Piece, Record, Rows
from moetune.memory.closed_form.sizes import Sizes, places, values_of
from moetune.memory.report import PART_NAMES, Parts
from moetune.step.loss import Chunks


@dataclass(frozen=True)
class Peak:
    """The fullest moment.

    Attributes:
        alive: [blocks] how many storages like each are alive then.
        values: [blocks] their bytes, of one.
        rounded: the most that is alive at once where each size is rounded up as the allocator does, which may be at
            another moment.
        host: the most that is on the host at once.
    """

    piece: Piece
    alive: np.ndarray
    values: np.ndarray
    total: int
    rounded: int
    host: int


def evaluate(record: Record, sizes: Sizes, rows: Rows, batch: Chunks, held_out: Chunks | None) -> Peak:
    """The peak at these sizes.

    Args:
        batch, held_out: how the loss divides its tokens.
    """
    values = record.coefficients * values_of(record.powers, sizes)[record.monomials]
    for counts, which in ((rows.trained, ~record.held_out), (rows.held_out, record.held_out)):
        goes = which & (record.experts >= 0)
        if goes.any():
            of_groups = [sum(counts[expert] for expert in group) for group in record.groups]
            values[goes] *= np.asarray(of_groups, dtype=np.int64)[record.experts[goes]]
    values[~np.where(record.held_out, places(held_out)[record.places], places(batch)[record.places])] = 0
    on_host = np.array([kind.on_host for kind in record.named])[record.kinds]
    here, there = np.where(on_host, 0, values), np.where(on_host, values, 0)
    most, moment = _fullest(record, here)
    rounded, _ = _fullest(record, -(-here // SMALLEST_BLOCK) * SMALLEST_BLOCK)
    host, _ = _fullest(record, there)
    return Peak(record.pieces[moment[0]], _alive(record, moment), values, most, rounded, host)


def _fullest(record: Record, sizes: np.ndarray) -> tuple[int, tuple[int, int, int]]:
    """The most that is alive at once of blocks of these sizes, and when: the piece, its repetition, the place in it."""
    alive = most = 0
    moment = 0, 0, 0
    for number, piece in enumerate(record.pieces):
        times = 1 if piece.unit < 0 else len(record.copies[piece.unit])
        changes = np.cumsum(sizes[piece.blocks] * piece.signs)
        net = int(changes[-1]) if len(changes) else 0
        if len(changes):
            at = int(np.argmax(changes))
            copy = times - 1 if net > 0 else 0
            if (full := alive + copy * net + int(changes[at])) > most:
                most, moment = full, (number, copy, at)
        alive += times * net + int((sizes[piece.once] * piece.once_signs).sum())
    return most, moment


def _alive(record: Record, moment: tuple[int, int, int]) -> np.ndarray:
    number, copy, at = moment
    alive = np.zeros(len(record.coefficients), dtype=np.int64)
    for piece in record.pieces[:number]:
        times = 1 if piece.unit < 0 else len(record.copies[piece.unit])
        np.add.at(alive, piece.blocks, piece.signs * times)
        np.add.at(alive, piece.once, piece.once_signs)
    piece = record.pieces[number]
    np.add.at(alive, piece.blocks, piece.signs * copy)
    np.add.at(alive, piece.blocks[: at + 1], piece.signs[: at + 1])
    return alive


def parts_of(record: Record, peak: Peak) -> Parts:
    """The bytes at the peak, by part."""
    taken = peak.alive * peak.values
    sums = dict.fromkeys(PART_NAMES, 0)
    for number, kind in enumerate(record.named):
        if not kind.on_host:
            sums[kind.part] += int(taken[record.kinds == number].sum())
    return Parts(**sums)
