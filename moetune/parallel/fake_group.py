"""One rank of a layout without the others, for predictions: a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from moetune.compat.torch import fake_process_group
from moetune.config.schema import ParallelConfig
from moetune.parallel.deepspeed import without_others
from moetune.parallel.ranks import SINGLE_RANK, Ranks


@contextmanager
def fake_ranks(parallel: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Inside, this process is that rank: collectives return at once, and bring nothing."""
    if parallel.ranks == 1:
        yield SINGLE_RANK
        return
    with (
        fake_process_group(rank, parallel.ranks),
        without_others() if parallel.engine == "deepspeed" else nullcontext(),
    ):
        yield Ranks.join(parallel, "cpu")
