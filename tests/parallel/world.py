"""Real processes on this machine, joined by gloo."""

import io
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moetune.compat.deepspeed import keep_quiet
from tests.processes import processes

_TIMEOUT = timedelta(seconds=60)


def run(ranks: int, work: Callable[..., Any], *args: Any, joined: bool = True) -> list[Any]:
    """What `work(*args)` returns on each of so many ranks. `work` is a function of a module that tests can import.

    Args:
        joined: whether ranks know of each other; if not, their numbers come before `args`.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ends, started = [], []
        for rank in range(ranks):
            mine, theirs = processes.Pipe(duplex=False)
            given = args if joined else (rank, *args)
            its = (theirs, store, rank, ranks if joined else 1, work, given)
            process = processes.Process(target=_rank, args=its, daemon=True)
            process.start()
            theirs.close()
            ends.append(mine)
            started.append(process)
        answers: list[Any] = [None] * ranks
        try:
            for rank in range(ranks):
                try:
                    error, payload = ends[rank].recv()
                except EOFError:
                    error, payload = "it ended without a word", b""
                assert error is None, f"rank {rank}:\n{error}"
                answers[rank] = torch.load(io.BytesIO(payload), weights_only=False)
        finally:
            for process in started:
                process.kill()
                process.join()
    return answers


def _rank(end: Any, store: str, rank: int, ranks: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    keep_quiet(torch.device("cpu"))
    try:
        if ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_TIMEOUT
            )
        payload = io.BytesIO()
        torch.save(work(*args), payload)
        end.send((None, payload.getvalue()))
    except BaseException:
        end.send((traceback.format_exc(), b""))
    finally:
        end.close()
        os._exit(0)  # without gloo's farewells, which wait for ranks that are gone
