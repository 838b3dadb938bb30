"""How a run becomes several processes: by torchrun or accelerate, or by starting the ranks of this machine itself."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moetune.config import ParallelConfig
from moetune.errors import UserError
from moetune.parallel.ranks import Ranks

_ABOUT_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
_ERROR_FILE, _PARENT = "TORCHELASTIC_ERROR_FILE", "MOETUNE_PARENT"
_GRACE = 5.0  # seconds in which the other ranks may still say what went wrong with them


def was_launched() -> bool:
    """Whether something has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_launch(parallel: ParallelConfig) -> None:
    """Raises `UserError` if as many processes were not started as the run file has ranks, or they cannot have a GPU."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and started != parallel.ranks:
        raise UserError(
            f"{started} processes were started, and parallel: in the run file makes {parallel.ranks} ranks; start "
            f"{parallel.ranks}, or change parallel: and hardware.count"
        )
    on_this = parallel.ranks if started == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", started))
    if torch.cuda.is_available() and torch.cuda.device_count() < on_this:
        raise UserError(
            f"parallel: wants {on_this} ranks on this machine, which has {torch.cuda.device_count()} GPUs; each rank "
            "needs one of its own. Start the other ranks on other machines with torchrun"
        )


@contextmanager
def joined(parallel: ParallelConfig, device_type: str) -> Iterator[Ranks]:
    """This process as one of the ranks, until the end of the `with`.

    What the environment says of ranks is taken out of it: libraries that find it there would distribute the model once
    more.

    Raises:
        UserError: as `check_launch`.
    """
    check_launch(parallel)
    if parallel.ranks == 1:
        yield Ranks()
        return
    _die_with_parent()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=parallel.timeout),
        device_id=device,
    )
    for name in _ABOUT_RANK:
        os.environ.pop(name, None)
    try:
        yield Ranks.join(parallel, device_type)
        dist.barrier()  # none goes while another still has to be answered
    finally:
        dist.destroy_process_group()


def note_failure(message: str) -> None:
    """Leaves what went wrong on this rank where its launcher looks for it: ours, or torchrun."""
    file = os.environ.get(_ERROR_FILE)
    if file and not Path(file).exists():
        said = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}, "at": time.time()}
        Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")


def is_quiet() -> bool:
    """Whether this process is a rank that leaves speaking to its launcher."""
    return _PARENT in os.environ


def start_ranks(command: Sequence[str], ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Runs `command` once for each rank on this machine; the first rank has stdin, stdout and stderr.

    The first failure ends all ranks, and its message is what stderr gets.

    Returns:
        The exit code of the rank that failed first, or 0.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as folder, _free_port() as port:
        common = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), _PARENT: str(os.getpid())}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), _ERROR_FILE: str(Path(folder) / f"{rank}.json")}
            with (Path(folder) / f"{rank}.log").open("w") as log:
                if rank == 0:
                    processes.append(subprocess.Popen(command, env=common | own))
                else:
                    nothing = subprocess.DEVNULL
                    environment = common | own
                    processes.append(
                        subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=log, env=environment)
                    )
        try:
            code = _wait(processes)
        except KeyboardInterrupt:  # every rank has had it too
            _end(processes)
            raise
        if code:
            print(_first_error(Path(folder), processes), file=sys.stderr)
        return code


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Until all have ended, or one has failed and the others were given time to say so too."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = time.monotonic() + _GRACE
            while time.monotonic() < deadline and any(process.poll() is None for process in processes):
                time.sleep(0.05)
            _end(processes)
        time.sleep(0.05)
    failed = [process.returncode for process in processes if process.returncode]
    usual = [code for code in failed if code > 0]  # those that we ended have a negative one
    return usual[0] if usual else (128 - failed[0] if failed else 0)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for signal_, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal_)
        deadline = time.monotonic() + (patience or 60.0)
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break


def _first_error(folder: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    """What the rank says that failed first; of one that was killed, that it was."""
    said = []
    for rank, process in enumerate(processes):
        file = folder / f"{rank}.json"
        if file.is_file():
            said.append((json.loads(file.read_text(encoding="utf-8"))["message"], rank))
        elif process.returncode and process.returncode < 0 and process.returncode != -signal.SIGTERM:
            name = signal.Signals(-process.returncode).name
            return f"error: rank {rank} was ended by {name}; the other ranks were stopped"
        elif process.returncode and process.returncode > 0:
            tail = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")[-4000:]
            said.append(({"message": tail or f"it ended with code {process.returncode}", "at": float("inf")}, rank))
    if not said:
        return "error: a rank failed without a word"
    first, rank = min(said, key=lambda one: (one[0]["at"], one[1]))
    everyone = all(message["message"] == first["message"] for message, _ in said) and len(said) == len(processes)
    return f"error: {first['message']}" if everyone else f"error: rank {rank}: {first['message']}"


@contextmanager
def _free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port


def _die_with_parent() -> None:
    """A rank whose launcher is killed ends too, instead of waiting for others that will never come."""
    if _PARENT in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ[_PARENT]):
            os._exit(1)
