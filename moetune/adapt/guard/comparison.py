"""Comparison of a run's kernels with torch's operations, in child processes.

A kernel that accesses memory illegally ends its whole process, and one that hangs can only be stopped by killing the
process. A child runs a few layers of the run's own model forward and backward (adapt/exercise.py), in which a dispatch
mode compares each operator with the arguments, layouts and aliases of a training step.
"""

import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from multiprocessing import Pipe
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.config.schema import RunConfig
from moetune.errors import one_line
from moetune.kernels.registry import OPERATORS, KernelError, Operator, is_out_of_memory, on_gpu, using_kernels

LIMIT = 120.0
"""Seconds that the comparison of one operator may take; most of it is the compilation of its kernel."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1.5e-2}
"""Largest accepted difference relative to a result's largest value, by dtype; torch rounds more often in 16 bits."""
_CHILD = "import sys; from moetune.adapt.exercise import compare_here; compare_here(int(sys.argv[1]))"
Line = tuple[str, str] | None
"""What a child says: the operator that it begins to compare, or "" after one, and what is wrong with its kernel, or "".
None says that all are compared."""


class Verdict(NamedTuple):
    """The result of a comparison.

    Attributes:
        failed: operator -> what is wrong with its kernel, such as `differs by …`.
        stopped: why the comparison ended before all operators were compared; empty if it did not.
    """

    failed: dict[str, str]
    stopped: str = ""


# --- Children -----------------------------------------------------------------------------------------------------


def compare(device: torch.device, runs: Sequence[RunConfig], limit: float = inf) -> Verdict:
    """Compare kernels with their references in the calls of `runs`, in child processes, for at most `limit` seconds.

    A child ends at a kernel that hangs or breaks the device; the next child leaves that kernel out.
    """
    until = time.monotonic() + limit
    if on_gpu() is None:
        # grouped products may run by torch's own kernel, and without any they take the same memory
        names = sorted(OPERATORS.keys() - {"grouped_mm"})
        return Verdict(dict.fromkeys(names, "cannot be compiled: Triton does not work here"))
    failed: dict[str, str] = {}
    while True:
        child = _child(device.index or 0, runs, tuple(failed), until)
        failed |= child.failed
        if not child.stopped or not child.failed:
            return Verdict(failed, child.stopped)


def _child(device: int, runs: Sequence[RunConfig], without: Collection[str], until: float = inf) -> Verdict:
    """Compare all operators but those in `without` in a process of its own, until a time of `time.monotonic`."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    ours, theirs = Pipe()
    failed: dict[str, str] = {}
    name, is_silent = "", False
    with tempfile.TemporaryFile() as errors, ours:
        # -P: modules are not imported from the working folder, whose files may have their names
        child = subprocess.Popen(
            (sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())), pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        theirs.close()
        try:
            ours.send((device, runs, without))
            while not (is_silent := not ours.poll(max(0.0, min(LIMIT, until - time.monotonic())))):
                line: Line = ours.recv()
                if line is None:
                    return Verdict(failed)
                name, why = line
                if why:
                    failed[name] = why
        except (EOFError, OSError):  # it has ended
            child.wait(LIMIT)
        finally:
            child.kill()
            child.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    if time.monotonic() >= until:  # no fault of the operator whose turn it is
        return Verdict(failed, "it took longer than other ranks may wait")
    failure = f"ended its process ({'; '.join(last) or f'code {child.returncode}'})"
    if is_silent:
        failure = f"did not finish within {LIMIT:.0f} seconds (moetune doctor RUN.yaml compares again)"
    if name and (is_silent or child.returncode != -9):  # 9 is how the system ends a process for want of memory
        failed.setdefault(name, failure)
    return Verdict(failed, failure if name else f"the comparison {failure}")


def compare_call(
    operator: Operator, args: Sequence[Any], *, dtype: torch.dtype, done: set[Hashable], say: Callable[[Line], None]
) -> Any:
    """Compare the kernel of one call with its reference, and return the reference's result.

    `say` reports each step. In `done` are the operators that failed and the kinds of calls that were compared, to which
    this adds: they are not compared again. `dtype`, that of the token rows, decides how large a difference is accepted.

    Raises:
        Exception: memory ran out, or the device failed, so that no further call can be compared.
    """
    kind = operator.name, *map(kind_of, args)
    kernel = None if {operator.name, kind} & done else operator.kernel(*args)
    if kernel is None:
        return referred(operator, *args)
    done.add(kind)
    say((operator.name, ""))
    try:
        for off in differences(operator, args, kernel):
            if not is_alike(off, dtype):
                done.add(operator.name)
                say((operator.name, f"differs from torch's operations by {off:.1e} of the largest value"))
                break
            say((operator.name, ""))  # each tile has the time of an operator
    except Exception as error:  # of the compiler, the driver or the device
        if is_out_of_memory(error):
            say(("", ""))
            raise
        is_refused = isinstance(error, KernelError)
        failure = "cannot be compiled or launched" if is_refused else f"raises {type(error).__name__}"
        done.add(operator.name)
        say((operator.name, f"{failure} ({one_line(error)})"))
        torch.cuda.synchronize()  # raises if the device is of no use any more
    result = referred(operator, *args)
    say(("", ""))
    return result


# --- One call -----------------------------------------------------------------------------------------------------


class CallsSeen(TorchDispatchMode):
    """Dispatch mode in which a call of an operator that has a kernel returns `compute(operator, args)` instead."""

    def __init__(self, compute: Callable[[Operator, Sequence[Any]], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = OPERATORS.get(func._opname) if func.namespace == "moetune" else None
        return func(*args, **(kwargs or {})) if operator is None else self._compute(operator, args)


def differences(operator: Operator, args: Sequence[Any], kernel: Callable[..., Any]) -> Iterator[float]:
    """Yield how much an operator's `kernel` differs from its reference, once for each tile.

    The first is with the tile that the kernel chooses, then follow all tiles that it can choose from (tuning.py),
    because a run with more rows may choose another. A difference is the largest over all results and changed arguments,
    relative to the largest value of each; NaN if a value is NaN. Integers and dequantized weights must be equal: their
    difference is 0 or 1. Tiles that do not compile are skipped. All runs on copies of the arguments.
    """
    written = getattr(torch.ops.moetune, operator.name).default._schema.arguments
    changed = [
        index
        for index, argument in enumerate(written)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in operator.scratch
    ]

    def outcome(launch: Callable[..., Any]) -> list[Any]:
        copies = copied(args)
        results = launch(*copies)
        if operator.name == "choose":  # of equal logits either may be chosen
            results = results[0], args[0].gather(1, results[1])
        return [*(results if isinstance(results, tuple) else (results,)), *(copies[index] for index in changed)]

    expected = outcome(partial(referred, operator))
    before = [*[None] * (len(expected) - len(changed)), *(args[index] for index in changed)]

    def difference(launch: Callable[..., Any]) -> float:
        differences = [0.0]
        for _ in range(2):  # the second launch takes the shorter way of launch.py
            for result, reference, old in zip(outcome(launch), expected, before, strict=True):
                if isinstance(reference, Tensor) and reference.numel():
                    if old is not None:  # what is left as it was may be uninitialized
                        result, reference = _where_written(old, result, reference)
                    is_exact = operator.name.startswith("dequantize")
                    differences.append(_difference(result, reference, is_exact=is_exact))
        return float(torch.tensor(differences, dtype=torch.float64).max())

    yield difference(kernel)
    for tile in getattr(kernel, "tiles", ()):
        with suppress(KernelError):
            yield difference(partial(kernel, tile=tile))


def referred(operator: Operator, *args: Any) -> Any:
    """Return the result of an operator's reference, in which no other operator's kernel runs."""
    with using_kernels(but=OPERATORS):
        return operator.reference(*args)


def copied(args: Sequence[Any]) -> list[Any]:
    """Return copies of an operator's arguments. Strides stay, and arguments that shared a storage still do."""
    return copy.deepcopy([arg.detach() if isinstance(arg, Tensor) else arg for arg in args])


def kind_of(arg: Any) -> Hashable:
    """Return the properties of an argument that select a compiled kernel, to tell kinds of calls apart.

    These leave out the number of rows but for whether an expert has none, a float's value unless it is 0, and the
    alignment of rows' positions (int64).
    """
    if isinstance(arg, Tensor):
        is_aligned = arg.dtype == torch.int64 or arg.storage_offset() * arg.itemsize % 16 == 0
        return arg.dtype, arg.shape[1:], arg.stride(), is_aligned
    if isinstance(arg, (list, tuple)):
        return 0 in arg
    return bool(arg) if isinstance(arg, float) else arg


def _where_written(before: Tensor, result: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of two results that either has written to; those before are compared bit by bit."""
    bits = [tensor.contiguous().view(torch.uint8).view(*tensor.shape, -1) for tensor in (before, result, reference)]
    is_written = ((bits[1] != bits[0]) | (bits[2] != bits[0])).any(-1)
    return torch.where(is_written, result, 0), torch.where(is_written, reference, 0)


def _difference(result: Tensor, reference: Tensor, *, is_exact: bool) -> float:
    if is_exact or not reference.is_floating_point():
        return float((result != reference).any())
    result, reference = result.double(), reference.double()
    return float((result - reference).abs().max() / reference.abs().max().clamp_min(1e-30))


def is_alike(difference: float, dtype: torch.dtype) -> bool:
    """Return whether a kernel's relative difference is within `TOLERANCE` of a dtype; False for NaN."""
    return difference <= TOLERANCE[dtype]
