"""A rank's coordinates on the axes of `parallel:`, and group sizes; without torch."""

from dataclasses import dataclass
from math import gcd

from moetune.config.schema import ParallelConfig


@dataclass(frozen=True)
class Coordinates:
    """A rank's index on each axis of the layout.

    Rank numbers count `tp` fastest, then `fsdp`, `replicate` and `pp`. `ep` regroups the `replicate · fsdp · tp` ranks
    of a pipeline stage: `ep` consecutive ranks store different experts. The ranks that store the same experts are `ep`
    apart; each `expert_shards` in a row share one copy of these experts.

    Attributes:
        pp: pipeline stage; stages divide the decoder layers.
        replicate: index of the copy of the weights.
        fsdp: index among the ranks that share one copy of the weights.
        tp: index among the ranks that split matrices.
        ep: index among the ranks that store different experts.
        shard: index among the ranks that share one copy of the same experts.
        copy: index of that copy.
    """

    pp: int = 0
    replicate: int = 0
    fsdp: int = 0
    tp: int = 0
    ep: int = 0
    shard: int = 0
    copy: int = 0

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int) -> "Coordinates":
        """Return the coordinates of rank number `rank`, from 0."""
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
    """Return the number of parts that the data of a step are divided into: replicate · fsdp."""
    return parallel.replicate * parallel.fsdp


def token_shares(parallel: ParallelConfig) -> int:
    """Return the number of ranks that divide the same tokens among them for dispatch to experts.

    That is tp under expert parallelism; else 1, because each tensor-parallel rank then runs the experts of all its
    tokens.
    """
    return parallel.tp if parallel.ep > 1 else 1


def expert_shards(parallel: ParallelConfig) -> int:
    """Return the number of ranks that shard one copy of the same experts.

    With expert parallelism it is fsdp · tp / gcd(fsdp · tp, ep), else fsdp.
    """
    if parallel.ep == 1:
        return parallel.fsdp
    return parallel.fsdp * parallel.tp // gcd(parallel.fsdp * parallel.tp, parallel.ep)


def expert_copies(parallel: ParallelConfig) -> int:
    """Return the number of copies of the same experts, each shared by `expert_shards` ranks, in a pipeline stage."""
    if parallel.ep == 1:
        return parallel.replicate * parallel.tp
    return parallel.replicate * parallel.fsdp * parallel.tp // parallel.ep // expert_shards(parallel)
