"""One rank of a layout without the others: torch.distributed with a backend that sends nothing, for predictions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from moetune.config import ParallelConfig
from moetune.parallel.deepspeed import without_others
from moetune.parallel.ranks import ALONE, Ranks


@contextmanager
def pretending(parallel: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Inside, this process is that rank: collectives return at once, and bring nothing."""
    if parallel.ranks == 1:
        yield ALONE
        return
    assert not dist.is_initialized(), "a rank of a running job cannot pretend to be one of another"
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # torch's would name the rank
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
        stack.callback(_clear_sharding_prop_cache)  # it remembers meshes, which know groups by names that are gone
        stack.callback(dist.destroy_process_group)
        if parallel.engine == "deepspeed":
            stack.enter_context(without_others())
        yield Ranks.join(parallel, "cpu")
