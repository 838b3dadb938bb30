"""Which rows a step trains on: each row once an epoch, in an order drawn from the seed for each epoch.

One process cuts that order into micro-batches of B rows, and a step takes the next A of them. D ranks that see
different data take every D-th, so that a step of D ranks with A micro-batches each is a step of one process with D·A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetune.parallel.ranks import Ranks


@dataclass(frozen=True)
class MicroBatch:
    """The numbers of its rows, and whether they count: a rank that has no rows left runs along on some that do not."""

    rows: list[int]
    counts: bool = True


def shuffled(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def share(order: Sequence[int], micro_batch: int, ranks: Ranks) -> list[MicroBatch]:
    """This rank's micro-batches. All ranks have equally many, because a forward pass needs all of them."""
    cut = [list(order[at : at + micro_batch]) for at in range(0, len(order), micro_batch)]
    mine = [MicroBatch(rows) for rows in cut[ranks.data_index :: ranks.data_size]]
    each = -(-len(cut) // ranks.data_size)
    return mine + [MicroBatch(cut[0], counts=False)] * (each - len(mine))
