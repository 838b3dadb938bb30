"""A run that was not started as several processes starts the ranks of this machine. Nothing here imports torch."""

from __future__ import annotations

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
from pathlib import Path

from typing_extensions import TypedDict

from moetune.documents import read_json
from moetune.errors import UserError, shown

PARENT = "MOETUNEPARENT"
"""In the environment of a rank: the process that started it."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_GRACE = 5.0  # seconds in which the other ranks may still say what went wrong with them


def was_launched() -> bool:
    """Whether something has started this process as one of several."""
    return number_in_environment("WORLD_SIZE", 1) > 1


def number_in_environment(name: str, default: int | None = None) -> int:
    """What a launcher says of this process, `RANK` say; raises `UserError` if it is missing or no number."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name}={shown(text)} in the environment is no number; unset it, or start with torchrun")
    return int(text)


def note_failure(message: str) -> None:
    """Leaves what went wrong on this rank where its launcher looks for it: ours, or torchrun."""
    file = os.environ.get(_ERROR_FILE)
    if file and not Path(file).exists():
        said = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}, "at": time.time()}
        Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")


def is_quiet() -> bool:
    """Whether this process is a rank that leaves speaking to its launcher."""
    return PARENT in os.environ


def start_ranks(command: Sequence[str], ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Runs `command` once for each rank on this machine; the first rank has stdin, stdout and stderr.

    The first failure ends all ranks, and its message is what stderr gets.

    Returns:
        The exit code of the rank that failed first, or 0.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as folder, free_port() as port:
        common = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PARENT: str(os.getpid())}
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
        with _passing_on(processes) as passed:
            code = _wait(processes)
        if code and signal.SIGINT in passed:
            raise KeyboardInterrupt
        if code and not passed:
            print(_first_error(Path(folder), processes), file=sys.stderr)
        return code


@contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM go to the ranks, which end as they see fit; gives those that came. A terminal sends
    Ctrl-C to the ranks itself, too: they take what comes within a second for one."""
    passed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


class _Message(TypedDict):
    message: str
    at: float


class _Failure(TypedDict):
    message: _Message


def _first_error(folder: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    """What the rank says that failed first; of one that was killed, that it was."""
    said = []
    for rank, process in enumerate(processes):
        file = folder / f"{rank}.json"
        if file.is_file():
            said.append((read_json(file, _Failure)["message"], rank))
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
def free_port() -> Iterator[int]:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port
