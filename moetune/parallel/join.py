"""A process becomes a rank: one of several that moetune, torchrun or accelerate started, or one without the others."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from moetune.compat.torch import fake_process_group
from moetune.config.schema import ParallelConfig
from moetune.errors import UserError, counted, reading
from moetune.parallel.deepspeed import without_others
from moetune.parallel.launch import PARENT, number_in_environment
from moetune.parallel.ranks import SINGLE_RANK, Ranks

_ABOUT_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


def check_launch(parallel: ParallelConfig) -> None:
    """Raise `UserError` unless as many processes run as the run file has ranks, with a GPU for each."""
    started = number_in_environment("WORLD_SIZE", 1)
    if started > 1 and started != parallel.ranks:
        raise UserError(
            f"{started} processes were started, and parallel: in the run file makes {counted(parallel.ranks, 'rank')}; "
            f"start {parallel.ranks}, or change parallel: and hardware.count"
        )
    on_this = parallel.ranks if started == 1 else number_in_environment("LOCAL_WORLD_SIZE", started)
    if torch.cuda.is_available() and torch.cuda.device_count() < on_this:
        raise UserError(
            f"parallel: wants {counted(on_this, 'rank')} on this machine, which has "
            f"{counted(torch.cuda.device_count(), 'GPU')}; each rank needs one of its own. "
            f"Start the other ranks on other machines with torchrun"
        )


@contextmanager
def joined(parallel: ParallelConfig, device_type: str) -> Iterator[Ranks]:
    """Make this process one of the ranks within the `with` block.

    The environment variables about ranks are removed: libraries that find them would distribute the model once more.

    Raises:
        UserError: as `check_launch`.
    """
    check_launch(parallel)
    if parallel.ranks == 1:
        yield SINGLE_RANK
        return
    _die_with_parent()
    rank, world = number_in_environment("RANK"), number_in_environment("WORLD_SIZE")
    local = number_in_environment("LOCAL_RANK", rank)
    number_in_environment("MASTER_PORT")
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    with reading(
        f"what the environment says of the other {world - 1} ranks", "start with torchrun, or unset WORLD_SIZE"
    ):
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=parallel.timeout),
            device_id=device,
        )
    for name in _ABOUT_RANK:
        os.environ.pop(name, None)
    # transformers' TrainingArguments, which reporters need, warn that each rank runs as if it were alone.
    about_mode = "parallel_mode != ParallelMode.DISTRIBUTED"
    logging.getLogger("transformers.training_args").addFilter(lambda record: about_mode not in record.getMessage())
    try:
        yield Ranks.join(parallel, device_type)
        dist.barrier()  # none goes while another still has to be answered
    finally:
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """Let the kernel kill this rank if its launcher is killed, instead of waiting for others that will never come."""
    if PARENT in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ[PARENT]):
            os._exit(1)


@contextmanager
def fake_ranks(parallel: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Make this process a rank without the others, for predictions: collectives return at once and send nothing."""
    if parallel.ranks == 1:
        yield SINGLE_RANK
        return
    alone = without_others() if parallel.engine == "deepspeed" else nullcontext()
    with fake_process_group(rank, parallel.ranks), alone:
        yield Ranks.join(parallel, "cpu")
