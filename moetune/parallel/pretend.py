"""One rank of a layout without the others: torch.distributed with a backend that sends nothing, for predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from moetune.config import ParallelConfig
from moetune.parallel.ranks import ALONE, Ranks


@contextmanager
def pretending(parallel: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Inside, this process is that rank: collectives return at once, and bring nothing."""
    if parallel.ranks == 1:
        yield ALONE
        return
    assert not dist.is_initialized(), "a rank of a running job cannot pretend to be one of another"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
    try:
        yield Ranks.join(parallel, "cpu")
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it remembers meshes, which know groups by names that are gone
