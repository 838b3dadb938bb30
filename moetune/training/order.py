"""The order of training rows: which rows each rank trains on in each step.

An epoch has each row once, in an order drawn from the seed and the epoch. The order is cut into micro-batches of B
rows, and a step takes the next A of them. With D ranks that see different data, each rank takes every D-th micro-batch,
so a step of D ranks with A micro-batches each has the same rows as a step of one process with D·A micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetune.parallel.ranks import Ranks


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass.

    Attributes:
        rows: indices into the data set.
        counts: False for a filler on a rank that has fewer micro-batches than others. A filler is computed, because a
            forward pass needs all ranks, but gives neither loss nor expert load.
    """

    rows: list[int]
    counts: bool = True


def shuffled(rows: int, seed: int, epoch: int) -> list[int]:
    """Return the indices 0 … rows - 1 in the order of one epoch; the same arguments give the same order."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def share(order: Sequence[int], micro_batch: int, ranks: Ranks) -> list[MicroBatch]:
    """Return the micro-batches of this rank in one pass over `order`; their number is the same on every rank.

    The last micro-batch of `order` may have fewer rows; a rank with fewer micro-batches gets a filler (`counts=False`).

    Args:
        order: indices of rows; not empty.
        micro_batch: rows per micro-batch.
    """
    cut = [list(order[at : at + micro_batch]) for at in range(0, len(order), micro_batch)]
    mine = [MicroBatch(rows) for rows in cut[ranks.data_index :: ranks.data_size]]
    each = -(-len(cut) // ranks.data_size)
    return mine + [MicroBatch(cut[0], counts=False)] * (each - len(mine))
