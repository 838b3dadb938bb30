"""Start a process per rank, report the first that fails; without torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moetune.errors import UserError, shown
from moetune.json_files import read_json

PARENT = "MOETUNEPARENT"
"""Environment variable that `start_ranks` sets for its ranks: the process id of the launcher."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_GRACE = 5.0  # seconds for other ranks to report an error, and again to end after SIGTERM


def was_launched() -> bool:
    """Return whether this process is one of several ranks: the environment's `WORLD_SIZE` is above 1.

    Raises `UserError` if it is not a number.
    """
    return number_in_environment("WORLD_SIZE", 1) > 1


def number_in_environment(name: str, default: int | None = None) -> int:
    """Return an environment variable that a launcher sets, such as `RANK`, as a non-negative integer.

    Raises `UserError` if the variable is not a decimal number of at most 9 digits, or is not set and has no `default`.
    """
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name}={shown(text)} in the environment is no number; unset it, or start with torchrun")
    return int(text)


def note_failure(message: str) -> None:
    """Write this rank's error message to the file that its launcher, moetune or torchrun, reads.

    Does nothing without a launcher (`TORCHELASTIC_ERROR_FILE` is not set), or if the file exists already.
    """
    file = os.environ.get(_ERROR_FILE)
    if file and not Path(file).exists():
        body = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}, "at": time.time()}
        Path(file).write_text(json.dumps({"message": body}), encoding="utf-8")


def is_quiet() -> bool:
    """Return whether `start_ranks` started this process, so that the launcher prints its errors."""
    return PARENT in os.environ


def start_ranks(command: Sequence[str], ranks: int) -> int:
    """Run `command` once for each rank on this machine, and wait until all have ended.

    Rank 0 has this process's stdin, stdout and stderr. The others have no stdin or stdout; stderr goes to a temporary
    file. If a rank fails, the others get a few seconds to end, then are stopped, and the error of the rank that failed
    first is printed on stderr. SIGINT and SIGTERM are passed on to the ranks.

    Returns:
        0, or the exit code of the rank whose error is printed: 128 + the signal that ended a rank, such as 137 where
            the system killed it, else that of the lowest-numbered rank that failed.

    Raises:
        KeyboardInterrupt: ranks failed after a SIGINT.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as name:
        folder = Path(name)
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), PARENT: str(os.getpid())}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        processes = []
        for rank in range(ranks):
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), _ERROR_FILE: str(folder / f"{rank}.json")}
            with (folder / f"{rank}.log").open("w") as log:
                nothing = subprocess.DEVNULL
                streams: dict[str, Any] = {} if rank == 0 else {"stdin": nothing, "stdout": nothing, "stderr": log}
                processes.append(subprocess.Popen(command, env=env, **streams))
        with _passing_on(processes) as passed:
            stopped = _wait(processes)
        if not any(process.returncode for process in processes):
            return 0
        if signal.SIGINT in passed:
            raise KeyboardInterrupt
        code, error = _failure(folder, processes, stopped)
        if not passed:
            print(f"error: {error}", file=sys.stderr)
        return code


@contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the ranks within the `with` block; yield the list of signals received so far.

    A terminal sends Ctrl-C to the ranks too, so they count signals within a second as one.
    """
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


def _wait(processes: list[subprocess.Popen[bytes]]) -> set[int]:
    """Wait until all processes have ended; return the ranks that had to be stopped.

    After a failure, the others get `_GRACE` seconds to end, then are stopped: by SIGTERM, and after as long again by
    SIGKILL.
    """
    stopped = set[int]()
    while not _have_ended(processes, 0.0):
        if any(process.poll() for process in processes) and not _have_ended(processes, _GRACE):
            stopped |= {rank for rank, process in enumerate(processes) if process.poll() is None}
            for process in processes:
                process.terminate()
            if not _have_ended(processes, _GRACE):
                for process in processes:
                    process.kill()
    return stopped


def _have_ended(processes: list[subprocess.Popen[bytes]], patience: float) -> bool:
    """Wait until all processes have ended, for at most `patience` seconds; return whether they have."""
    deadline = time.monotonic() + patience
    while is_running := any(process.poll() is None for process in processes):
        time.sleep(0.05)
        if time.monotonic() > deadline:
            break
    return not is_running


def _failure(folder: Path, processes: list[subprocess.Popen[bytes]], stopped: set[int]) -> tuple[int, str]:
    """Return the exit code that `start_ranks` documents, and the error of the rank that failed first.

    A signal that ended a rank comes first, other than SIGTERM and those for the ranks `stopped` by this launcher,
    because others then fail because of it. `folder` has what the ranks wrote: `<rank>.json` from `note_failure`, and
    `<rank>.log`, stderr of all but rank 0.
    """
    codes = [process.returncode for process in processes]
    for rank, code in enumerate(codes):
        if code < 0 and -code != signal.SIGTERM and rank not in stopped:
            why = ", as the system does when the machine's memory runs out" if -code == signal.SIGKILL else ""
            name = signal.Signals(-code).name
            return 128 - code, f"rank {rank} was ended by {name}{why}; the other ranks were stopped"
    errors: list[tuple[float, int, str]] = []  # time, rank, message
    for rank, code in enumerate(codes):
        if (file := folder / f"{rank}.json").is_file():
            noted = read_json(file, dict[str, dict[str, Any]])["message"]
            errors.append((noted["at"], rank, noted["message"]))
        elif code > 0:
            tail = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")[-4000:]
            errors.append((float("inf"), rank, tail or f"it ended with code {code}"))
    code = next((code for code in codes if code > 0), 128 + signal.SIGTERM)
    if not errors:
        return code, "a rank failed and left no message"
    _, rank, first = min(errors)
    is_common = len(errors) == len(processes) and all(message == first for _, _, message in errors)
    return code, first if is_common else f"rank {rank}: {first}"


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
