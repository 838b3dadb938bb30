"""`best`: one option for each layer of a stack, so that most time is saved under a limit of memory; exact."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Option(NamedTuple):
    """What one layer may keep, and what that takes and saves.

    Attributes:
        bytes: memory that is alive from the layer's forward pass to its backward pass; not negative.
        peak: the most memory that the layer's own passes need, if no layer, this one included, kept any `bytes`.
        saves: what is to be maximized, such as nanoseconds; an integer, so that equal sums are equal.
    """

    bytes: int
    peak: int
    saves: int


def fits(layers: Sequence[Sequence[Option]], chosen: Sequence[int], limit: int, end: int) -> bool:
    """Return whether a choice, the index of an option for each layer, needs at most `limit` bytes; see `best`."""
    alive = 0
    for options, index in zip(layers, chosen, strict=True):
        alive += options[index].bytes
        if alive + options[index].peak > limit:
            return False
    return alive + end <= limit


def best(layers: Sequence[Sequence[Option]], limit: int, end: int) -> list[int] | None:
    """Return the index of an option for each layer with the largest sum of `saves`; None if no choice fits.

    A layer's passes need its `peak` and the `bytes` of this and all earlier layers; after the last layer, `end` and the
    `bytes` of all. Both must be at most `limit`.

    Choices for the first n layers are compared by the bytes that they keep and by what they save. One that is not
    better in either than another cannot become better later, because everything else depends on the bytes alone.
    """
    kept, saved = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # for each layer: [states] index of the state before, and option
    for options in layers:
        bytes_of, peak, saves = (np.array(column, dtype=np.int64) for column in zip(*options, strict=True))
        more, gains = kept[:, None] + bytes_of, saved[:, None] + saves
        before, option = np.nonzero(np.maximum(more + peak, more + end) <= limit)
        more, gains = more[before, option], gains[before, option]
        order = np.lexsort((-gains, more))  # fewest bytes first; of equal bytes, most saved first
        gains = gains[order]
        better = np.ones(len(order), dtype=bool)
        better[1:] = gains[1:] > np.maximum.accumulate(gains)[:-1]
        order = order[better]
        kept, saved = more[order], gains[better]
        steps.append((before[order], option[order]))
        if not len(kept):
            return None
    state, chosen = len(kept) - 1, []
    for before, option in reversed(steps):
        chosen.append(int(option[state]))
        state = int(before[state])
    return chosen[::-1]
