"""The guard of a run on CUDA: its kernels are compared with torch's operations on this machine, at the run's own sizes.

A child process compares them, because a kernel that accesses memory illegally ends its whole process, and one that
hangs can only be killed. The verdict is kept on disk under all that it depends on (`Key`), so that the next start need
not compare. An operator whose kernel differs, raises or does not finish runs torch's operations instead, and is listed
in the run's `hardware.without_kernels`, which the run folder and every prediction of the run contain.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetune.adapt.exercise import Sizes, sizes_of
from moetune.errors import UserError, one_line
from moetune.experts.kernels.registry import OPERATORS, KernelError, Operator, is_out_of_memory, on_gpu, without_kernel
from moetune.experts.kernels.self_check import CallsSeen, differences, is_alike, referred
from moetune.files import cache_folder, write_whole
from moetune.json_files import parse_json, read_sealed, sealed
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.ranks import Ranks
from moetune.run.dtypes import DTYPES
from moetune.run.resolved import ResolvedRun

LIMIT = 120.0
"""Seconds that the comparison of one operator may take; most of it is the compilation of its kernel."""
# -P: import no files of the working folder
_CHILD = (sys.executable, "-P", "-c", "from moetune.adapt.guard import compare_here; compare_here()")


def checked(run: ResolvedRun, device: torch.device, say: Callable[[str], None]) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the operators whose kernel does not work on `device`.

    The kernels are compared with torch's operations, unless a verdict of the same comparison is kept or the device is a
    CPU. `say` prints that a comparison runs, and which kernels do not work.
    """
    if device.type != "cuda" or not any(sizes := sizes_of(run)):
        return run
    key = Key.of(device, sizes)
    verdict = kept(key)
    if verdict is None:
        say("comparing the kernels with torch's operations at the sizes of this run, once on this machine …")
        verdict = compare(key, device)
        if not verdict.is_complete:
            say(f"warning: the kernels could not be compared ({verdict.stopped}); they run unchecked")
    for name, why in verdict.failed.items():
        say(f"warning: the kernel of {name} {why}: torch's operations run in its place, slower, and predicted as such")
    return _without(run, verdict.failed)


def checked_on_ranks(run: ResolvedRun, device: torch.device, ranks: Ranks, say: Callable[[str], None]) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the operators whose kernel fails on any rank. The first
    rank runs `checked` before the others, which compare only if they do not find its verdict on disk."""
    if ranks.is_first:
        run = checked(run, device, say)
    ranks.barrier()
    if not ranks.is_first:
        run = checked(run, device, lambda _: None)
    mine = run.config.hardware.without_kernels
    others = {name for names in ranks.gather(mine) for name in names} - {*mine}
    for name in sorted(others):
        say(
            f"warning: the kernel of {name} does not work on another rank: torch's operations run in its place here too"
        )
    return _without(run, others) if others else run


def note_dropped(run: ResolvedRun, device: torch.device) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the operators whose kernel failed to compile during the
    run, at a call that was not compared before, and add these to the kept verdict. Returns `run` itself if there are
    none."""
    failed = {name: why for name, why in without_kernel().items() if name not in run.config.hardware.without_kernels}
    if device.type != "cuda" or not failed:
        return run
    key = Key.of(device, sizes_of(run))
    if (known := kept(key)) is not None:  # else the next start compares
        keep(Verdict(key, known.failed | failed))
    return _without(run, failed)


def as_known(run: ResolvedRun, device: torch.device) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the kernels that failed an earlier comparison on
    `device`.

    Only a verdict kept on disk is read; nothing is compared. Returns `run` itself without such a verdict or a CUDA
    device.
    """
    if device.type != "cuda" or not any(_folder().glob("*.json")) or not any(sizes := sizes_of(run)):
        return run
    verdict = kept(Key.of(device, sizes))
    return run if verdict is None else _without(run, verdict.failed)


def as_known_for(run: ResolvedRun, card: Gpu | None) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the kernels that failed an earlier comparison on `card`.

    Only a verdict kept on disk is read; nothing is compared. Returns `run` itself without such a verdict or a CUDA GPU,
    or if this machine's first GPU differs from `card` in both name and total memory. None stands for the first GPU.
    """
    if not torch.cuda.is_available() or not any(_folder().glob("*.json")):
        return run
    device = torch.device("cuda", 0)
    here = torch.cuda.get_device_properties(device)
    # a card that is not in the catalog is identified by its memory
    is_here = card is None or card.full_name == here.name or card.memory.value == here.total_memory
    return as_known(run, device) if is_here else run


def _without(run: ResolvedRun, failed: Iterable[str]) -> ResolvedRun:
    names = tuple(sorted({*run.config.hardware.without_kernels, *failed}))
    return replace(run, config=run.config.but(hardware={"without_kernels": names}))


# --- Verdicts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """What a verdict depends on.

    Attributes:
        card: the GPU's name and compute capability.
        driver: version of the driver, and of the CUDA that it supports.
        versions: those of torch and Triton; under `ptxas` which ptxas Triton calls.
        kernels: digest of the source of kernels, references and exercises.
        sizes: the sizes at which they are compared.
    """

    card: str
    driver: str
    versions: dict[str, str]
    kernels: str
    sizes: Sizes

    @classmethod
    def of(cls, device: torch.device, sizes: Sizes) -> Key:
        major, minor = torch.cuda.get_device_capability(device)
        card = f"{torch.cuda.get_device_name(device)}, {major}.{minor}"
        versions = {"torch": torch.__version__, "triton": _triton(), "ptxas": _ptxas()}
        return cls(card, _driver(), versions, _digest(), sizes)

    @property
    def file(self) -> Path:
        """The file in which the verdict is kept."""
        text = json.dumps(asdict(self), sort_keys=True)
        return _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        key: what was compared, and where.
        failed: operator -> what is wrong with its kernel, such as `differs by …`.
        stopped: why the comparison ended before all operators were compared; empty if it did not.
    """

    key: Key
    failed: dict[str, str]
    stopped: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.stopped


def kept(key: Key) -> Verdict | None:
    """Return the verdict kept under a key; None if there is none, it is incomplete, or its file is damaged."""
    try:
        verdict = read_sealed(key.file, Verdict)
    except UserError:  # not there, or not what was written: compared again
        return None
    return verdict if verdict.key == key and verdict.is_complete else None


def keep(verdict: Verdict) -> None:
    """Write a complete verdict to disk; errors of the file system are ignored."""
    if verdict.is_complete:
        with suppress(OSError):
            verdict.key.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(verdict.key.file, sealed(asdict(verdict)))


def _folder() -> Path:
    return cache_folder("kernels")


def _driver() -> str:
    """Return the version of the driver, as its kernel module says, and of the CUDA that it supports, such as 13000."""
    module, cuda = "", ctypes.c_int()
    with suppress(OSError):  # there is no such file under WSL
        module = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    return f"{module} CUDA {cuda.value}".strip()


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _ptxas() -> str:
    """Return which ptxas Triton calls: its own, or files named by the environment, with their sizes and modification
    times."""
    named = []
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        if path := os.environ.get(variable):
            with suppress(OSError):
                found = Path(path).stat()
                named.append(f"{path} {found.st_size} {found.st_mtime_ns}")
    return ", ".join(named) or "Triton's own"


@cache
def _digest() -> str:
    """Return a digest of the source of the kernels, their references and the exercises."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*here.glob("*.py"), *(here.parent / "experts").rglob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# --- The comparison -----------------------------------------------------------------------------------------------


def compare(key: Key, device: torch.device) -> Verdict:
    """Compare the kernels at the sizes of a key with their references, in child processes; keep the verdict on disk.

    A child ends at a kernel that hangs or breaks the device, and the next child leaves that kernel out. If a kernel
    hung, the verdict is not kept, because a busy machine may have been the reason.
    """
    if on_gpu() is None:  # not kept: a compiler can be installed at any time
        # all but the grouped product: torch's own kernel needs no Triton, and the reference takes the same memory
        names = sorted(OPERATORS.keys() - {"grouped_mm"})
        return Verdict(key, dict.fromkeys(names, "cannot be compiled: Triton does not work here"))
    failed: dict[str, str] = {}
    in_time = True
    while True:
        before = len(failed)
        ended = _child(_Asked(key.sizes, device.index or 0, tuple(failed)))
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
    """What a child is to compare: all operators but `without`, at `sizes`, on the GPU with the index `device`."""

    sizes: Sizes
    device: int
    without: tuple[str, ...] = ()


@dataclass
class _Said:
    """A line that a child writes: the operator that it begins to compare, what failed, or how it ended.

    Attributes:
        begins: operator; empty once it is compared.
        failed: operator -> what is wrong with its kernel.
        stopped: None until the child ends; then why it did not compare all, empty if it did.
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


def _child(asked: _Asked) -> _Ended:
    """Run `compare_here` in a process of its own, and return what it found."""
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
            lines, in_time = _lines_of(child)
        finally:
            child.kill()
            child.wait()
            with suppress(BrokenPipeError):
                child.stdin.close()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    said = [parse_json(line, _Said, "the comparison of the kernels") for line in lines]
    failed = {name: why for one in said for name, why in one.failed.items()}
    if said and said[-1].stopped is not None:
        return _Ended(failed, said[-1].stopped)  # even if the child does not exit afterwards
    name = said[-1].begins if said else ""
    how = f"ended its process ({'; '.join(last) or f'code {child.returncode}'})"
    if not in_time:
        how = f"did not finish within {LIMIT:.0f} seconds"
    if name and (not in_time or child.returncode != -9):  # 9 is how the system ends a process for want of memory
        failed[name] = how
    return _Ended(failed, how if name else f"the comparison {how}", in_time)


def _lines_of(child: subprocess.Popen[bytes]) -> tuple[list[bytes], bool]:
    """Return the whole lines that a child writes until it ends or has been silent for `LIMIT` seconds; and whether it
    ended."""
    assert child.stdout is not None
    text = b""
    with child.stdout as out:
        while select.select([out], [], [], LIMIT)[0]:
            if not (more := os.read(out.fileno(), 1 << 16)):
                child.wait(LIMIT)
                return text.splitlines(), True
            text += more
    return text.split(b"\n")[:-1], False


def compare_here() -> None:
    """Run in a child: read an `_Asked` from the first line of stdin, compare kernels with references, and print a
    `_Said` for each step. Ends its process, also when stdin is closed, because the process that asked has then ended.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with our lines
    asked = parse_json(sys.stdin.buffer.readline(), _Asked, "stdin")
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
    device, failed, code = torch.device("cuda", asked.device), set(asked.without), 0

    def say(said: _Said) -> None:
        print(json.dumps(asdict(said)), file=out, flush=True)

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
            say(_Said(stopped=f"out of memory: {one_line(error)}"))
        else:
            traceback.print_exc()
            code = 1
    else:
        say(_Said(stopped=""))
    sys.stderr.flush()
    os._exit(code)  # not an exit of the interpreter, which would wait for the lock of stdin that the thread holds


def _compare_call(
    operator: Operator, args: Sequence[Any], *, dtype: torch.dtype, failed: set[str], say: Callable[[_Said], None]
) -> Any:
    """Compare one call's kernel with its reference, report the outcome by `say` and in `failed`, and return the
    reference's result. Raises if the device is out of memory or can no longer be used."""
    kernel = None if operator.name in failed else operator.kernel(*args)
    if kernel is None:
        return referred(operator, args)
    say(_Said(begins=operator.name))
    try:
        for off in differences(operator, args, kernel):
            if not is_alike(off, dtype):
                failed.add(operator.name)
                why = f"differs from torch's operations by {off:.1e} of the largest value"
                say(_Said(failed={operator.name: why}))
                break
            say(_Said(begins=operator.name))  # `LIMIT` applies to each tile anew
    except Exception as error:  # raised by the compiler, the driver or the device
        if is_out_of_memory(error):
            raise
        raised = (
            "cannot be compiled or launched" if isinstance(error, KernelError) else f"raises {type(error).__name__}"
        )
        failed.add(operator.name)
        say(_Said(failed={operator.name: f"{raised} ({one_line(error)})"}))
        torch.cuda.synchronize()  # raises if the device is of no use any more
    result = referred(operator, args)
    say(_Said())
    return result
