"""Global and shared memory of a launch, whose accesses are checked as a sanitizer checks them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor


class Fault(Exception):
    """A kernel did what is undefined on a GPU."""


def _check_alignment(addresses: np.ndarray, width: int) -> None:
    if (addresses % width).any():
        raise Fault(f"an address of {width} bytes is not a multiple of {width}")


class GlobalMemory:
    """The tensors that a launch may read and write, from the first to the last byte of each."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans: list[list[int]] = []
        for tensor in sorted(tensors, key=Tensor.data_ptr):
            if tensor.numel():
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                start, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
                if spans and start < spans[-1][1]:
                    spans[-1][1] = max(spans[-1][1], end)
                else:
                    spans.append([start, end])
        self._starts, self._ends = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        # whole words of 8 bytes, so that a span can be viewed as words of any width
        self._origins = self._starts & -8
        self._bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (-(-end // 8) * 8 - origin)).from_address(origin))
            for origin, end in zip(self._origins.tolist(), self._ends.tolist(), strict=True)
        ]

    def _words(
        self, addresses: np.ndarray, count: int, word: np.dtype
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (which addresses, words of a span, indices of the addresses' words in it) for every span."""
        width = count * word.itemsize
        _check_alignment(addresses, width)
        number = np.searchsorted(self._starts, addresses, "right") - 1
        if number.min() < 0 or (addresses + width > self._ends[number]).any():
            raise Fault(f"an access of {width} bytes outside of the kernel's tensors")
        for span in range(number.min(), number.max() + 1):
            if (here := number == span).any():
                index = (addresses[here] - self._origins[span]) // word.itemsize
                yield here, self._bytes[span].view(word), index[:, None] + np.arange(count)

    def read(self, addresses: np.ndarray, count: int, word: np.dtype) -> np.ndarray:
        """Return [n, count] consecutive words at each of n addresses."""
        found = np.empty((len(addresses), count), word)
        for here, words, index in self._words(addresses, count, word) if len(addresses) else ():
            found[here] = words[index]
        return found

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write [n, count] words."""
        for here, words, index in self._words(addresses, values.shape[1], values.dtype) if len(addresses) else ():
            words[index] = values[here]


class SharedMemory:
    """Shared memory of several blocks.

    An access is a race if another warp reached the same two bytes since the block's last barrier, and one of both
    writes.
    """

    SEVERAL = -2

    def __init__(self, blocks: int, size: int) -> None:
        self._size, self._row = size, -(-size // 16) * 16 + 16
        self.bytes = np.full(blocks * self._row, 0xFF, np.uint8)  # a float that no one has written is NaN
        self.epoch = np.zeros(blocks, np.int32)  # barriers that a block has passed
        cells = blocks * self._row // 2
        self._writer, self._reader = (np.full(cells, -1, np.int16) for _ in range(2))
        self._written, self._read = (np.full(cells, -1, np.int32) for _ in range(2))

    def _index(
        self, addresses: np.ndarray, block: np.ndarray, warp: np.ndarray, width: int, writes: bool
    ) -> np.ndarray:
        """Return the places of addresses in `bytes`, and note who reaches them."""
        _check_alignment(addresses, width)
        if (addresses < 0).any() or (addresses + width > self._size).any():
            raise Fault(f"an access of {width} bytes outside of {self._size} bytes of shared memory")
        index = block * self._row + addresses
        cells = (index[:, None] // 2 + np.arange(-(-width // 2))).ravel()
        epoch, warp = (
            np.repeat(of.astype(to), len(cells) // len(index))
            for of, to in ((self.epoch[block], np.int32), (warp, np.int16))
        )
        if ((self._written[cells] == epoch) & (self._writer[cells] != warp)).any():
            raise Fault("a race in shared memory: another warp has written, and there was no barrier since")
        if not writes:
            others = (self._read[cells] == epoch) & (self._reader[cells] != warp)
            self._reader[cells] = np.where(others, self.SEVERAL, warp)
            self._read[cells] = epoch
            self._reader[cells[self._reader[cells] != warp]] = self.SEVERAL  # several warps of this instruction
            return index
        if ((self._read[cells] == epoch) & (self._reader[cells] != warp)).any():
            raise Fault("a race in shared memory: another warp has read, and there was no barrier since")
        self._writer[cells], self._written[cells] = warp, epoch
        return index

    def read(
        self, addresses: np.ndarray, block: np.ndarray, warp: np.ndarray, count: int, word: np.dtype
    ) -> np.ndarray:
        """Return [n, count] consecutive words at each of n addresses of a thread's block."""
        index = self._index(addresses, block, warp, count * word.itemsize, False) // word.itemsize
        return self.bytes.view(word)[index[:, None] + np.arange(count)]

    def write(self, addresses: np.ndarray, block: np.ndarray, warp: np.ndarray, values: np.ndarray) -> None:
        """Write [n, count] words."""
        count, word = values.shape[1], values.dtype
        index = self._index(addresses, block, warp, count * word.itemsize, True) // word.itemsize
        words, places = self.bytes.view(word), index[:, None] + np.arange(count)
        words[places] = values
        if (words[places] != values).any():
            raise Fault("a race in shared memory: two threads write different values to one place")
