"""A record becomes a number: bytes at any sizes, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetune.memory.closed_form.record import Piece, Record, Rows
from moetune.memory.closed_form.sizes import Sizes, values_of
from moetune.memory.report import PART_NAMES, Parts


@dataclass(frozen=True)
class Peak:
    """The fullest moment.

    Attributes:
        alive: [blocks] how many storages like each are alive then.
        values: [blocks] their bytes, of one.
    """

    piece: Piece
    alive: np.ndarray
    values: np.ndarray
    total: int
    host: int


def evaluate(record: Record, sizes: Sizes, rows: Rows) -> Peak:
    """The peak at these sizes."""
    values = record.coefficients * values_of(record.powers, sizes)[record.monomials]
    for counts, which in ((rows.trained, ~record.held_out), (rows.held_out, record.held_out)):
        goes = which & (record.experts >= 0)
        if goes.any():
            of_groups = [sum(counts[expert] for expert in group) for group in record.groups]
            values[goes] *= np.asarray(of_groups, dtype=np.int64)[record.experts[goes]]
    on_host = np.array([kind.on_host for kind in record.named])[record.kinds]
    here, there = np.where(on_host, 0, values), np.where(on_host, values, 0)
    alive = most = host_alive = host_most = 0
    best: tuple[int, int, int] = (0, 0, 0)
    for number, piece in enumerate(record.pieces):
        times = 1 if piece.unit < 0 else len(record.copies[piece.unit])
        changes = np.cumsum(here[piece.blocks] * piece.signs)
        net = int(changes[-1]) if len(changes) else 0
        if len(changes):
            at = int(np.argmax(changes))
            copy = times - 1 if net > 0 else 0
            if (full := alive + copy * net + int(changes[at])) > most:
                most, best = full, (number, copy, at)
        alive += times * net + int((here[piece.once] * piece.once_signs).sum())
        on = np.cumsum(there[piece.blocks] * piece.signs)
        if len(on):
            host_net = int(on[-1])
            host_most = max(host_most, host_alive + max(0, (times - 1) * host_net) + int(on.max()))
            host_alive += times * host_net + int((there[piece.once] * piece.once_signs).sum())
    return Peak(record.pieces[best[0]], _alive(record, best), values, most, host_most)


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
