"""Which rows a step trains on: each row once an epoch, in an order drawn from the seed and the epoch.

The order is cut into micro-batches of B rows, and a step takes the next A of them. Each of D ranks that see different
data takes every D-th micro-batch: a step of D ranks with A micro-batches each is a step of one process with D·A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetune.parallel.ranks import Ranks


@dataclass(frozen=True)
class MicroBatch:
    """Indices of rows. Where a rank has none left it computes others, which do not count."""

    rows: list[int]
    counts: bool = True


def shuffled(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the order of rows in an epoch."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def share(order: Sequence[int], micro_batch: int, ranks: Ranks) -> list[MicroBatch]:
    """Return this rank's micro-batches, as many on every rank, because a forward pass needs all ranks."""
    cut = [list(order[at : at + micro_batch]) for at in range(0, len(order), micro_batch)]
    mine = [MicroBatch(rows) for rows in cut[ranks.data_index :: ranks.data_size]]
    each = -(-len(cut) // ranks.data_size)
    return mine + [MicroBatch(cut[0], counts=False)] * (each - len(mine))
