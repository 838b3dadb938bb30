"""Commands in processes of their own: what is predicted of their memory, and what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_TAKEN = """
import sys
from moetune.compat.glibc import give_back_memory
from moetune.cli.main import app
give_back_memory()
app(sys.argv[1:], standalone_mode=False)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("peak", int(status["VmHWM"].split()[0]) * 1024, file=sys.stderr)
"""


def predicted(*command: object) -> dict[str, Any]:
    """The report of a command with `--predict`."""
    arguments = [sys.executable, "-m", "moetune", *map(str, command), "--predict", "--json"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def taken(*command: object) -> int:
    """The most bytes of host memory that the process of a command had: its own pages, and those of its libraries."""
    arguments = [sys.executable, "-c", _TAKEN, *map(str, command)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stderr.rpartition("peak ")[2])


def off(here: Path, command: str, *more: object, out: bool = True) -> float:
    """How far what is predicted of a command's host memory lies from what it takes, as a share of the latter."""
    expected = predicted(*command.split(), *more)["host"]["required_bytes"]["expected"]
    return expected / taken(*command.split(), *more, *(("--out", here / "out") if out else ())) - 1
