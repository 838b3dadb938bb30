"""The null device (device.c) from Python: whether it is there, what it was asked, and answers that it cannot give."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetune.adapt.guard import check
from moetune.adapt.guard.comparison import Verdict
from moetune.experts import context

_library = ctypes.CDLL(None)


@dataclass(frozen=True)
class Asked:
    """What the device was asked.

    Attributes:
        products: cuBLAS's; they are launches too.
        registrations: of host memory, to pin it.
        managed: bytes of managed memory, which may be on either side, that are there now.
    """

    launches: int
    synchronizations: int
    copies: int
    fills: int
    products: int
    registrations: int
    managed: int

    def __sub__(self, before: "Asked") -> "Asked":
        return Asked(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


def is_present() -> bool:
    """Whether this process runs on the null device."""
    return hasattr(_library, "null_counts")


def asked() -> Asked:
    """Since the process began."""
    counts = (ctypes.c_long * len(fields(Asked)))()
    _library.null_counts(counts)
    return Asked(*counts)


@contextmanager
def logging(file: Path) -> Iterator[None]:
    """Writes each launch, copy, fill, record, wait and synchronization inside as a line of `file`."""
    _library.null_log(str(file).encode())
    try:
        yield
    finally:
        _library.null_log(None)


def mark(text: str) -> None:
    """Writes a line of the caller's own into the log."""
    _library.null_mark(text.encode())


@contextmanager
def answering(*, compares: bool = False) -> Iterator[None]:
    """Inside, code finds the values that it cannot do without. The device is asked for the real ones all the same, so
    that what they cost is counted.

    - `listed` says that all experts receive as many rows: shapes depend on it.
    - `tolist` and `cpu` of floats give ones: a mean divides by a sum, and what a copy leaves alone may be NaN.

    Any other number that the host reads is zero (device.c), which is finite, and no flag. So transformers, which looks
    whether all positions of a batch follow on one another, finds that they do not, as in a batch of packed documents,
    and makes their mask. And cuDNN is not asked for attention: its plans are made on a real card.

    Args:
        compares: False to take it for granted that all kernels work, which takes a child process to find out.
    """
    listed, tolist, cpu, compared = context.listed, Tensor.tolist, Tensor.cpu, check.compared
    with_cudnn = torch.backends.cuda.cudnn_sdp_enabled()

    def balanced(ends: Tensor, rows: int) -> list[int]:
        found = listed(ends, rows)
        each, extra = divmod(rows, len(ends))
        return [each + (number < extra) for number in range(len(ends))] if ends.is_cuda else found

    def ones(self: Tensor) -> Any:
        listed = tolist(self)
        return tolist(torch.ones(self.shape)) if self.is_cuda and self.is_floating_point() else listed

    def ones_on_host(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = cpu(self, *args, **kwargs)
        return copy.detach().fill_(1) if self.is_cuda and self.is_floating_point() else copy

    context.listed, Tensor.tolist, Tensor.cpu = balanced, ones, ones_on_host  # type: ignore[method-assign]
    if not compares:
        check.compared = lambda *_: Verdict({})
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        context.listed, Tensor.tolist, Tensor.cpu = listed, tolist, cpu  # type: ignore[method-assign]
        check.compared = compared
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
