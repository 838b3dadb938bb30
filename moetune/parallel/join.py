"""This process as a rank: with the other ranks' processes, or alone for a prediction."""

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
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.parallel.start_ranks import PARENT, number_in_environment

_ABOUT_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


def check_launch(parallel: ParallelConfig) -> None:
    """Raise `UserError` unless as many processes were started as the run file has ranks, and each has a GPU.

    GPUs are counted only if torch sees any. A process that no launcher started will start all ranks on this machine.
    """
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
    local = number_in_environment("LOCAL_RANK", number_in_environment("RANK", 0)) if started > 1 else 0
    if torch.cuda.is_available() and local >= torch.cuda.device_count():
        raise UserError(
            f"LOCAL_RANK says that this is process {local} of this machine, which has "
            f"{counted(torch.cuda.device_count(), 'GPU')}; set it to 0 and up on each machine, as torchrun does"
        )


@contextmanager
def joined(parallel: ParallelConfig, device_type: str) -> Iterator[Ranks]:
    """Make this process one of the run's ranks within the `with` block; yield its `Ranks`.

    With several ranks, torch.distributed is initialized with NCCL on "cuda", else with Gloo, and the launcher's
    environment variables (`RANK`, `WORLD_SIZE`, …) are removed, because libraries that find them would distribute the
    model again. At the end of the block all ranks wait for each other. Raises `UserError` if the processes or the GPUs
    do not suit the layout (`check_launch`), or the other ranks cannot be reached with the launcher's variables.
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
    # Reporters need transformers' TrainingArguments, which warn on each rank that the mode is not distributed.
    about_mode = "parallel_mode != ParallelMode.DISTRIBUTED"
    logging.getLogger("transformers.training_args").addFilter(lambda record: about_mode not in record.getMessage())
    try:
        yield Ranks.join(parallel, device_type)
        dist.barrier()  # no rank leaves while another still waits for it
    finally:
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """On Linux, let the kernel kill this rank if `start_ranks` is killed, so that it does not wait for others."""
    if PARENT in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ[PARENT]):
            os._exit(1)


@contextmanager
def fake_ranks(parallel: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Make this process rank `rank` without other processes within the `with` block, for predictions.

    Collectives return at once and send nothing. Yields the `Ranks` on CPU meshes, or `SINGLE_RANK` for one rank. Raises
    `UserError` if the layout uses DeepSpeed, which is not installed.
    """
    if parallel.ranks == 1:
        yield SINGLE_RANK
        return
    alone = without_others() if parallel.engine == "deepspeed" else nullcontext()
    with fake_process_group(rank, parallel.ranks), alone:
        yield Ranks.join(parallel, "cpu")
