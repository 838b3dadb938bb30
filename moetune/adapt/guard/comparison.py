"""Comparison of a run's kernels with torch's operations, in child processes.

A kernel that accesses memory illegally ends its whole process, and one that hangs can only be stopped by killing the
process.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch

from moetune.adapt.guard.exercise import Sizes
from moetune.adapt.guard.verdicts import Key, Verdict, keep
from moetune.errors import one_line
from moetune.experts.self_check import CallsSeen, differences, is_alike, referred
from moetune.json_files import parse_json
from moetune.kernels.registry import OPERATORS, KernelError, Operator, is_out_of_memory, on_gpu
from moetune.run.dtypes import DTYPES

LIMIT = 120.0
"""Seconds that the comparison of one operator may take; most of it is the compilation of its kernel."""
# -P: modules are not imported from the working folder, whose files may have their names
_CHILD = (sys.executable, "-P", "-c", "from moetune.adapt.guard.comparison import compare_here; compare_here()")


def compare(key: Key, device: torch.device, limit: float = inf) -> Verdict:
    """Compare kernels with their references at the sizes of a key, in child processes; write and return the verdict.

    A child ends at a kernel that hangs or breaks the device; the next child leaves that kernel out. If a kernel hung,
    the verdict is not written, because a busy machine may have been the reason.

    Args:
        limit: seconds after which the comparison stops.
    """
    until = time.monotonic() + limit
    if on_gpu() is None:  # not written to disk: a compiler can be installed at any time
        # grouped products may run by torch's own kernel, and without any they take the same memory
        names = sorted(OPERATORS.keys() - {"grouped_mm"})
        return Verdict(key, dict.fromkeys(names, "cannot be compiled: Triton does not work here"))
    failed: dict[str, str] = {}
    in_time = True
    while True:
        before = len(failed)
        ended = _child(_Asked(key.sizes, device.index or 0, tuple(failed)), until)
        failed |= ended.failed
        in_time &= ended.in_time
        if not ended.stopped:
            verdict = Verdict(key, failed)
            if in_time:
                keep(verdict)
            return verdict
        if len(failed) == before:
            return Verdict(key, failed, ended.stopped)


@dataclass(frozen=True)
class _Asked:
    """A request to a child process: which kernels to compare.

    Attributes:
        sizes: the sizes to compare them at.
        device: index of the GPU.
        without: operators that are left out.
    """

    sizes: Sizes
    device: int
    without: tuple[str, ...] = ()


@dataclass
class _Line:
    """A line that a child writes: the operator that it begins to compare, what failed, or how it ended.

    Attributes:
        begins: operator; empty once it is compared.
        failed: operator -> what is wrong.
        stopped: why nothing more is compared; empty if all is done, None while there is more.
    """

    begins: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None


class _Ended(NamedTuple):
    """How a child ended: the operators that failed, why it did not compare all (empty if it did), and whether it was
    never silent for `LIMIT` seconds."""

    failed: dict[str, str]
    stopped: str
    in_time: bool = True


def _child(asked: _Asked, until: float = inf) -> _Ended:
    """Run `compare_here` in a process of its own, until a time of `time.monotonic`, and return how it ended."""
    text = json.dumps(asdict(asked)).encode() + b"\n"
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            _CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | {"PYTHONPATH": path}
        )
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has ended already
                child.stdin.write(text)
                child.stdin.flush()
            lines, in_time = _lines_of(child, until)
        finally:
            child.kill()
            child.wait()
            with suppress(BrokenPipeError):
                child.stdin.close()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    lines_read = [parse_json(line, _Line, "the comparison of the kernels") for line in lines]
    failed = {name: why for one in lines_read for name, why in one.failed.items()}
    if lines_read and lines_read[-1].stopped is not None:
        return _Ended(failed, lines_read[-1].stopped)  # also of a child that does not end afterwards
    if time.monotonic() >= until:  # no fault of the operator whose turn it is
        return _Ended(failed, "it took longer than other ranks may wait", in_time)
    name = lines_read[-1].begins if lines_read else ""
    how = f"ended its process ({'; '.join(last) or f'code {child.returncode}'})"
    if not in_time:
        how = f"did not finish within {LIMIT:.0f} seconds"
    if name and (not in_time or child.returncode != -9):  # 9 is how the system ends a process for want of memory
        failed[name] = how
    return _Ended(failed, how if name else f"the comparison {how}", in_time)


def _lines_of(child: subprocess.Popen[bytes], until: float) -> tuple[list[bytes], bool]:
    """Return the whole lines that a child writes, and whether it ended; reading stops when it ends, when it has been
    silent for `LIMIT` seconds, or at the time `until`."""
    assert child.stdout is not None
    text = b""
    with child.stdout as out:
        while select.select([out], [], [], max(0.0, min(LIMIT, until - time.monotonic())))[0]:
            if not (more := os.read(out.fileno(), 1 << 16)):
                child.wait(LIMIT)
                return text.splitlines(), True
            text += more
    return text.split(b"\n")[:-1], False


def compare_here() -> None:
    """Run in a child: read an `_Asked` from the first line of stdin, compare kernels with references, and print a
    `_Line` for each step. Never returns: the process ends after the comparison, or as soon as stdin is closed, which
    means that the process that asked has ended."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no line of ours
    asked = parse_json(sys.stdin.buffer.readline(), _Asked, "stdin")
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
    device, failed, code = torch.device("cuda", asked.device), set(asked.without), 0

    def say(line: _Line) -> None:
        print(json.dumps(asdict(line)), file=out, flush=True)

    try:
        torch.cuda.set_device(device)
        torch.manual_seed(0)
        for sizes in asked.sizes:
            run = sizes.exercise(device)
            with CallsSeen(partial(_compare_call, dtype=DTYPES[sizes.dtype], failed=failed, say=say)):
                run()
            torch.cuda.synchronize(device)
    except Exception as error:
        if is_out_of_memory(error):
            say(_Line(stopped=f"out of memory: {one_line(error)}"))
        else:
            traceback.print_exc()
            code = 1
    else:
        say(_Line(stopped=""))
    sys.stderr.flush()
    os._exit(code)  # not an exit of the interpreter, which would wait for the lock of stdin that the thread holds


def _compare_call(
    operator: Operator, args: Sequence[Any], *, dtype: torch.dtype, failed: set[str], say: Callable[[_Line], None]
) -> Any:
    """Compare the kernel of one call with its reference, and return the reference's result.

    `say` reports each step. Operators in `failed` are not compared, and one that fails is added. `dtype`, that of the
    token rows, decides how large a difference is accepted.

    Raises:
        Exception: memory ran out, or the device failed, so that no further call can be compared.
    """
    kernel = None if operator.name in failed else operator.kernel(*args)
    if kernel is None:
        return referred(operator, args)
    say(_Line(begins=operator.name))
    try:
        for off in differences(operator, args, kernel):
            if not is_alike(off, dtype):
                failed.add(operator.name)
                why = f"differs from torch's operations by {off:.1e} of the largest value"
                say(_Line(failed={operator.name: why}))
                break
            say(_Line(begins=operator.name))  # each tile has the time of an operator
    except Exception as error:  # of the compiler, the driver or the device
        if is_out_of_memory(error):
            raise
        raised = (
            "cannot be compiled or launched" if isinstance(error, KernelError) else f"raises {type(error).__name__}"
        )
        failed.add(operator.name)
        say(_Line(failed={operator.name: f"{raised} ({one_line(error)})"}))
        torch.cuda.synchronize()  # raises if the device is of no use any more
    result = referred(operator, args)
    say(_Line())
    return result
