"""Which accesses to memory are ordered on the device, read from the log of what was launched on which stream.

Every stream, and the host, does one thing after another. Between them there is order only where one waits for another:
for an event that was recorded on it, or the host for a stream. So each has a clock for every other: how much of what
that one did came before (vector clocks, as race detectors have them). A copy that another stream or the host makes use
of without having waited for it is a race.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.nullcuda import device

Clock = dict[str, int]
HOST = "host"


class Accesses(TorchDispatchMode):
    """Writes into the log what memory each operation uses: the device's, and what is pinned on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        given = dict(zip(names, args, strict=False)) | kwargs
        reads = _tensors([value for name, value in given.items() if name not in written])
        writes = _tensors([value for name, value in given.items() if name in written])
        who = self._who(reads + writes)
        self._mark(who, "reads", reads, func)
        self._mark(who, "writes", writes, func)
        out = func(*args, **kwargs)
        if not written:
            made = _tensors(out)
            self._mark(self._who(reads + made), "writes", made, func)
        return out

    @staticmethod
    def _who(tensors: list[Tensor]) -> str:
        """The stream on which an operation on these is launched, or the host."""
        on_device = any(tensor.is_cuda for tensor in tensors)
        return f"{torch.cuda.current_stream().cuda_stream:#x}" if on_device else HOST

    def _mark(self, who: str, how: str, tensors: list[Tensor], func: OpOverload) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.is_cuda or tensor.is_pinned():
                device.mark(f"{how} {who} {storage.data_ptr():#x} {storage.nbytes()} {func}")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.numel()]


@dataclass(frozen=True)
class Access:
    """A stream, or the host, uses memory; `after` says how much of what each of the others did came before."""

    who: str
    time: int
    begin: int
    end: int
    writes: bool
    operation: str
    after: Clock

    def races_with(self, earlier: "Access") -> bool:
        """Whether nothing keeps this one behind an earlier one of the same memory."""
        return (
            self.who != earlier.who
            and (self.writes or earlier.writes)
            and self.after.get(earlier.who, 0) < earlier.time
        )


def accesses(log: Path) -> list[Access]:
    """In the order in which the host launched them."""
    clocks: dict[str, Clock] = {HOST: {}}
    events: dict[str, Clock] = {}
    found = []

    def meets(who: str, other: Clock) -> None:
        mine = clocks.setdefault(who, {})
        for name, time in other.items():
            mine[name] = max(mine.get(name, 0), time)

    for line in log.read_text().splitlines():
        what, *words = line.replace("(nil)", "0x0").split()
        match what:
            case "record":
                meets(words[0], clocks[HOST])
                events[words[1]] = dict(clocks[words[0]])
            case "wait":
                meets(words[0], events.get(words[1], {}))
            case "sync":
                known = events if words[0] == "event" else clocks
                for name in words[1:] or list(clocks):
                    meets(HOST, dict(known.get(name, {})))
            case "mark":
                how, who, begin, nbytes, operation = words
                meets(who, clocks[HOST])  # what the host launches comes after what it knows of
                clock = clocks[who]
                clock[who] = clock.get(who, 0) + 1
                at = int(begin, 16)
                found.append(Access(who, clock[who], at, at + int(nbytes), how == "writes", operation, dict(clock)))
    return found


def copies(found: list[Access]) -> list[Access]:
    """The accesses of copies beside what is computed: of every stream but the first one."""
    return [access for access in found if access.who not in (HOST, "0x0")]


def races(found: list[Access]) -> list[tuple[Access, Access]]:
    """Pairs (earlier, later) of which one is a copy's, and that nothing keeps in order."""
    beside = copies(found)
    touched = _touched_by(beside)
    numbered = [(number, access) for number, access in enumerate(found) if touched(access)]
    place = {id(access): number for number, access in enumerate(found)}
    pairs = []
    for copy in beside:
        begin, end, at = copy.begin, copy.end, place[id(copy)]
        for number, other in numbered:
            if other.begin < end and begin < other.end:
                earlier, later = (other, copy) if number < at else (copy, other)
                if later.races_with(earlier):
                    pairs.append((earlier, later))
    return pairs


def _touched_by(copies: list[Access]) -> Callable[[Access], bool]:
    """Whether an access is to memory that one of these also uses."""
    ranges: list[list[int]] = []
    for copy in sorted(copies, key=lambda copy: copy.begin):
        if ranges and copy.begin < ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], copy.end)
        else:
            ranges.append([copy.begin, copy.end])

    def touched(access: Access) -> bool:
        at = bisect_left(ranges, [access.end])  # the first range that begins behind it
        return at > 0 and ranges[at - 1][1] > access.begin

    return touched
