"""Host memory that is pinned as it lies. Torch's own pinned memory comes in powers of two.

To pin takes a call to the driver, whatever the size, and pins whole pages. So a large tensor has pages of its own, and
small ones share an arena that was pinned once.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moetune.errors import UserError

_LARGE = 1 << 20
_ARENA = 16 << 20
_ALIGNED = 64  # bytes, a line of the CPU's cache


def pinned(nbytes: int) -> Tensor:
    """So many bytes [nbytes], uint8, pinned for the CUDA device of this process.

    Raises:
        UserError: the system does not let so much be pinned.
    """
    if nbytes >= _LARGE:
        tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        weakref.finalize(tensor.untyped_storage(), _pin(tensor)).atexit = False
        return tensor
    arena = next((arena for arena in _arenas if arena.has_room_for(nbytes)), None)
    if arena is None:
        _arenas.append(arena := _Arena())
    return arena.take(nbytes)


class _Arena:
    """Pinned pages that are given out front to back, and begin anew when nothing in them is alive."""

    def __init__(self) -> None:
        self._pages, self._used, self._alive = mmap.mmap(-1, _ARENA), 0, 0
        _pin(torch.frombuffer(self._pages, dtype=torch.uint8))

    def has_room_for(self, nbytes: int) -> bool:
        return self._used + nbytes <= _ARENA

    def take(self, nbytes: int) -> Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, pin_memory=True)
        tensor = torch.frombuffer(self._pages, dtype=torch.uint8, count=nbytes, offset=self._used)
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        self._alive += 1
        weakref.finalize(tensor.untyped_storage(), self._died).atexit = False
        return tensor

    def _died(self) -> None:
        self._alive -= 1
        if not self._alive:
            self._used = 0


_arenas: list[_Arena] = []


def _pin(pages: Tensor) -> Callable[[], object]:
    """Pins memory as it lies; what it returns undoes that."""
    cudart, address = torch.cuda.cudart(), pages.data_ptr()
    if (code := int(cudart.cudaHostRegister(address, pages.nbytes, 0))) != 0:
        raise UserError(
            f"{pages.nbytes:,} bytes of host memory cannot be pinned (CUDA error {code}); "
            "free some, or raise the limit of locked memory (ulimit -l)"
        )
    return partial(cudart.cudaHostUnregister, address)
