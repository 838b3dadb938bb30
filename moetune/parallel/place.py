"""Where a rank stands: its coordinates on every axis of `parallel:`, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from moetune.config import ParallelConfig


@dataclass(frozen=True)
class Place:
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
    def of(cls, parallel: ParallelConfig, rank: int) -> Place:
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
    """How many ranks see different data."""
    return parallel.replicate * parallel.fsdp


def expert_shards(parallel: ParallelConfig) -> int:
    """Ranks that split the same experts between them: those of one replica."""
    if parallel.ep == 1:
        return parallel.fsdp
    return parallel.fsdp * parallel.tp // gcd(parallel.fsdp * parallel.tp, parallel.ep)


def expert_copies(parallel: ParallelConfig) -> int:
    """How many groups of such ranks hold the same experts."""
    if parallel.ep == 1:
        return parallel.replicate * parallel.tp
    return parallel.replicate * parallel.fsdp * parallel.tp // parallel.ep // expert_shards(parallel)


def indivisible(
    parallel: ParallelConfig, *, layers: int, experts: Sequence[int], kv_heads: int | None = None
) -> list[str]:
    """Every size of `parallel` that a model does not have the parts for, in words.

    Args:
        layers: how many it has.
        experts: how many each layer with experts has.
        kv_heads: key/value heads of attention, which tp cannot divide further.
    """
    pp, ep, tp = parallel.pp, parallel.ep, parallel.tp
    counts = sorted(set(experts))
    problems = []
    if pp > layers:
        problems.append(f"parallel.pp: {pp} stages and only {layers} layers; set pp to {layers}")
    if kv_heads is not None and kv_heads % tp:
        problems.append(
            f"parallel.tp: {tp} ranks cannot split {kv_heads} key/value heads evenly; set tp to {_divisors(kv_heads)}"
        )
    if ep > 1 and not counts:
        problems.append(f"parallel.ep: {ep} ranks to spread experts over, and the model has none; leave ep out")
    elif ep > 1 and ep > counts[0]:
        problems.append(
            f"parallel.ep: more ranks than experts, {ep} and {counts[0]}; set ep to {_divisors(gcd(*counts))}, "
            "and fsdp to the rest"
        )
    elif ep > 1 and any(count % ep for count in counts):
        named = " and ".join(str(count) for count in counts)
        problems.append(
            f"parallel.ep: {ep} ranks cannot hold {named} experts evenly; set ep to {_divisors(gcd(*counts))}"
        )
    if ep > 1 and ep % tp:
        problems.append(
            f"parallel.ep: {ep} is no multiple of tp {tp}; the ranks that split a matrix send their experts separate "
            "tokens, so set ep to a multiple of tp, or to 1"
        )
    return problems


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
