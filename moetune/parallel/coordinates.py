"""Coordinates of a rank on the axes of `parallel:`."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from moetune.config.schema import ParallelConfig


@dataclass(frozen=True)
class Coordinates:
    """A rank's coordinates. Innermost first: `tp` ranks split matrices, `fsdp` ranks share one copy of the weights,
    `replicate` such groups hold one each, `pp` stages split the layers.

    `ep` regroups the ranks of a stage: consecutive ones hold different experts. Of those that hold the same, a stride
    of ep apart, `shards` split them and `copies` such groups hold one each.
    """

    pp: int = 0
    replicate: int = 0
    fsdp: int = 0
    tp: int = 0
    ep: int = 0
    shard: int = 0
    copy: int = 0

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int) -> Coordinates:
        stage, inner = divmod(rank, parallel.replicate * parallel.fsdp * parallel.tp)
        shards = expert_shards(parallel)
        return cls(
            pp=stage,
            replicate=inner // (parallel.fsdp * parallel.tp),
            fsdp=inner // parallel.tp % parallel.fsdp,
            tp=inner % parallel.tp,
            ep=inner % parallel.ep,
            shard=inner // parallel.ep % shards,
            copy=inner // parallel.ep // shards,
        )


def data_ranks(parallel: ParallelConfig) -> int:
    """Number of ranks that see different data."""
    return parallel.replicate * parallel.fsdp


def expert_shards(parallel: ParallelConfig) -> int:
    """Number of ranks that shard the same experts: those of one replica."""
    if parallel.ep == 1:
        return parallel.fsdp
    return parallel.fsdp * parallel.tp // gcd(parallel.fsdp * parallel.tp, parallel.ep)


def expert_copies(parallel: ParallelConfig) -> int:
    """Number of groups of such ranks that hold the same experts."""
    if parallel.ep == 1:
        return parallel.replicate * parallel.tp
    return parallel.replicate * parallel.fsdp * parallel.tp // parallel.ep // expert_shards(parallel)
