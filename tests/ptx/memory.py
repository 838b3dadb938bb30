"""Global and shared memory of a launch, whose accesses are checked as a sanitizer checks them."""

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

WIDEST = 32
"""Bytes that the widest access moves."""
UNITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
EACH_BYTE = {size: int("01" * size, 16) for size in UNITS}


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
        # whole multiples of the widest access, so that a span can be viewed as accesses of any width
        self._origins = self._starts & -WIDEST
        self._bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (-(-end // WIDEST) * WIDEST - origin)).from_address(origin))
            for origin, end in zip(self._origins.tolist(), self._ends.tolist(), strict=True)
        ]

    @property
    def spans(self) -> dict[int, np.ndarray]:
        """First address -> bytes of a tensor, or of several that share some."""
        starts, ends, origins = (of.tolist() for of in (self._starts, self._ends, self._origins))
        return {
            start: words[start - origin : end - origin]
            for start, end, origin, words in zip(starts, ends, origins, self._bytes, strict=True)
        }

    def place(self, address: int) -> tuple[int, int] | None:
        """Return (first address of a span, bytes from there) of an address, or None for another number."""
        span = int(np.searchsorted(self._starts, address, "right")) - 1
        start = int(self._starts[span])
        return (start, address - start) if span >= 0 and address < self._ends[span] else None

    def _words(
        self, addresses: np.ndarray, count: int, word: np.dtype
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (which addresses, words of a span [places, count], the addresses' places in them) for every span."""
        width = count * word.itemsize
        _check_alignment(addresses, width)
        number = np.searchsorted(self._starts, addresses, "right") - 1
        if number.min() < 0 or (addresses + width > self._ends[number]).any():
            raise Fault(f"an access of {width} bytes outside of the kernel's tensors")
        for span in range(number.min(), number.max() + 1):
            if (here := number == span).any():
                words = self._bytes[span].view(word).reshape(-1, count)
                yield here, words, (addresses[here] - self._origins[span]) // width

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


@dataclass(frozen=True)
class _Reached:
    """Places in shared memory that an instruction has reached, in units of `width` bytes, and who did."""

    places: np.ndarray
    block: np.ndarray
    warp: np.ndarray
    width: int
    writes: bool

    def of(self, which: np.ndarray) -> "_Reached":
        """Return those of some accesses."""
        return _Reached(self.places[which], self.block[which], self.warp[which], self.width, self.writes)


class SharedMemory:
    """Shared memory of several blocks.

    Two accesses of the same byte, the least that has an order in PTX's memory model, are a race if two warps make them
    between the same barriers of the block, and one of both writes.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self._size, self._row = size, (size // WIDEST + 2) * WIDEST
        self.bytes = np.full(blocks * self._row, 0xFF, np.uint8)  # a float that no one has written is NaN
        self._warps, self._shared = (np.zeros(blocks * self._row, np.uint8) for _ in range(2))
        self._reached: list[_Reached] = []

    def _places(
        self, addresses: np.ndarray, block: np.ndarray, warp: np.ndarray, width: int, writes: bool
    ) -> np.ndarray:
        """Return the places of addresses in `bytes`, in units of `width`, and note who reaches them."""
        _check_alignment(addresses, width)
        if (addresses < 0).any() or (addresses + width > self._size).any():
            raise Fault(f"an access of {width} bytes outside of {self._size} bytes of shared memory")
        places = (block * self._row + addresses) // width
        self._reached.append(_Reached(places, block, warp, width, writes))
        return places

    def pass_barrier(self, blocks: np.ndarray) -> None:
        """Look for races among what some blocks have reached since their last barrier.

        Args:
            blocks: for each block, whether it has come to a barrier or to its end.
        """
        here, later = [], []
        for one in self._reached:
            ready = blocks[one.block]
            if ready.all():
                here.append(one)
            elif ready.any():
                here.append(one.of(ready))
                later.append(one.of(~ready))
            else:
                later.append(one)
        self._reached = later
        # Of every byte, or of every two if none is reached alone, the warp that comes last here, and whether there is
        # another.
        noted, grain = [], min((2, *(one.width for one in here)))
        for one in here:
            unit = UNITS[min(one.width // grain, max(UNITS))]
            places, warps = one.places, one.warp.astype(unit) * unit.type(EACH_BYTE[unit.itemsize])
            if (count := one.width // grain // unit.itemsize) > 1:
                places = (places[:, None] * count + np.arange(count)).ravel()
                warps = np.repeat(warps, count)
            self._warps.view(unit)[places] = warps
            noted.append((places, warps, one.writes))
        for places, warps, _ in noted:
            others = self._warps.view(warps.dtype)[places] ^ warps
            if (differ := others != 0).any():
                np.bitwise_or.at(self._shared.view(warps.dtype), places[differ], others[differ])
        for places, warps, writes in noted:
            if writes and self._shared.view(warps.dtype)[places].any():
                self._check_races(noted)
        for places, warps, _ in noted:
            self._shared.view(warps.dtype)[places] = 0

    def _check_races(self, noted: list[tuple[np.ndarray, np.ndarray, bool]]) -> None:
        """Raise a Fault unless each byte that several warps reach is only read, or reached by one instruction: then
        all of them write the same (see `write`)."""
        times, written = np.zeros(self._shared.shape, np.int32), np.zeros(self._shared.shape, bool)
        for places, warps, writes in noted:
            reached = np.zeros_like(self._shared)
            reached.view(warps.dtype)[places] = EACH_BYTE[warps.itemsize]
            times += reached
            written |= reached.astype(bool) & writes
        if (written & (self._shared != 0) & (times > 1)).any():
            raise Fault("a race in shared memory: two warps reach a byte without a barrier, and one writes")

    def read(
        self, addresses: np.ndarray, block: np.ndarray, warp: np.ndarray, count: int, word: np.dtype
    ) -> np.ndarray:
        """Return [n, count] consecutive words at each of n addresses of a thread's block."""
        places = self._places(addresses, block, warp, count * word.itemsize, False)
        return self.bytes.view(word).reshape(-1, count)[places]

    def write(self, addresses: np.ndarray, block: np.ndarray, warp: np.ndarray, values: np.ndarray) -> None:
        """Write [n, count] words."""
        count, word = values.shape[1], values.dtype
        places = self._places(addresses, block, warp, count * word.itemsize, True)
        words = self.bytes.view(word).reshape(-1, count)
        words[places] = values
        if (words[places] != values).any():
            raise Fault("a race in shared memory: two threads write different values to one place")
