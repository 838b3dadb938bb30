"""Simulation of torch's CUDA caching allocator: memory reserved for a sequence of storages, without a GPU.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` at their defaults, on one
stream. docs/concepts/allocator.md tells them in words and lists what is left out.

Every size in here is a multiple of 512 bytes once it is rounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

Event = tuple[int, int]
"""(id, bytes) when a storage is born; (id, -1) when it dies. A storage of 0 bytes takes nothing."""

WORKSPACES = 2
"""cuBLAS workspaces inside the allocator: one for each thread that multiplies, forward's and backward's."""

SMALLEST_BLOCK = 512  # kMinBlockSize
_LARGEST_SMALL = 1 << 20  # kSmallSize: requests up to here live in the small pool
_SMALL_PAGE = 2 << 20  # kSmallBuffer
_LARGE_PAGE = 20 << 20  # large_segment_size_
_OWN_SEGMENT = 10 << 20  # kMinLargeAlloc: requests from here have a segment of their own size
_OWN_ROUNDING = 2 << 20  # kRoundLarge
# torch reserves addresses for 9/8 of the card. More than any card has means that addresses never run out.
_ADDRESSES = 1 << 60


@dataclass(frozen=True)
class Reserved:
    """Result of a simulation, in bytes.

    Attributes:
        peak_allocated: the most that blocks in use took, as `torch.cuda.max_memory_allocated` counts.
        peak_reserved: the most that the allocator held of the card, as `torch.cuda.max_memory_reserved` counts.
        reserved_at_end: what it held last.
        cache_flushes: how often the card was full and all unused memory was given back to it, which stalls the GPU.
        fits: False if a request failed even then. The simulation ends there, as the process would.
    """

    peak_allocated: int
    peak_reserved: int
    reserved_at_end: int
    cache_flushes: int
    fits: bool


def simulate(events: Iterable[Event], *, expandable: bool, capacity: int | None = None) -> Reserved:
    """Simulate births and deaths of storages.

    Args:
        events: births and deaths in order. An id may be born again once it has died.
        expandable: with `expandable_segments:True`.
        capacity: bytes of the card that the allocator may hold: all but what stands outside of it. None: no limit.
    """
    card = _Card(capacity)
    large: _Pool
    small: _Pool
    if expandable:
        large, small = _ExpandablePool(card, _LARGE_PAGE), _ExpandablePool(card, _SMALL_PAGE)
    else:
        large, small = _SegmentPool(card, split_above=_LARGEST_SMALL), _SegmentPool(card, split_above=0)

    alive: dict[int, tuple[_Pool, _Block] | None] = {}
    allocated = peak_allocated = flushes = 0
    fits = True
    for key, nbytes in events:
        if nbytes < 0:
            if (held := alive.pop(key)) is not None:
                pool, block = held
                allocated -= block.size
                pool.release(block)
            continue
        assert key not in alive, f"storage {key} is born twice"
        if nbytes == 0:
            alive[key] = None
            continue
        size = _round_up(nbytes, SMALLEST_BLOCK)
        pool = small if size <= _LARGEST_SMALL else large
        found = pool.best_fit(size) or pool.grow(size)
        if found is None:
            flushes += 1
            large.give_back()
            small.give_back()
            found = pool.grow(size)
            if found is None:
                fits = False
                break
        block = pool.cut(found, size)
        alive[key] = (pool, block)
        allocated += block.size
        peak_allocated = max(peak_allocated, allocated)
    return Reserved(peak_allocated, card.peak, card.held, flushes, fits)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class _Card:
    """The memory that cudaMalloc and cuMemCreate hand out."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.held = 0
        self.peak = 0

    def take(self, nbytes: int) -> bool:
        if self.capacity is not None and self.held + nbytes > self.capacity:
            return False
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return True


class _Block:
    """A stretch of addresses: in use, free, or (in an expandable segment) free and without memory behind it.

    `before` and `after` are its neighbours in the same segment.
    """

    __slots__ = ("address", "after", "before", "in_use", "mapped", "size")

    def __init__(self, address: int, size: int, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.mapped = mapped
        self.in_use = False
        self.before: _Block | None = None
        self.after: _Block | None = None

    def split(self, size: int) -> _Block:
        """Cut the block to its first `size` bytes and return the rest."""
        rest = _Block(self.address + size, self.size - size, mapped=self.mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest


class _Pool(ABC):
    """Free blocks, by size and then address, so that a bisection finds the best fit.

    Two pools: requests up to 1 MiB, and larger ones. They share the card, never a block.
    """

    def __init__(self, card: _Card, split_above: int) -> None:
        self._card = card
        self._split_above = split_above
        self._free: list[tuple[int, int, _Block]] = []

    def best_fit(self, size: int) -> _Block | None:
        """Take the smallest free block of at least `size` bytes out of the pool."""
        index = bisect_left(self._free, (size,))
        return self._free.pop(index)[2] if index < len(self._free) else None

    @abstractmethod
    def grow(self, size: int) -> _Block | None:
        """Take memory from the card for a block of at least `size` bytes; None if the card has too little left."""

    @abstractmethod
    def give_back(self) -> None:
        """Return to the card all memory without a block in use."""

    def cut(self, block: _Block, size: int) -> _Block:
        """Put `block` in use; the rest beyond `size` bytes becomes a free block, unless it is too small."""
        block.in_use = True
        if block.size - size > self._split_above:
            self._add(block.split(size))
        return block

    def release(self, block: _Block) -> None:
        block.in_use = False
        self._merge(block)
        self._add(block)

    def _merge(self, block: _Block) -> None:
        """`block`, which is in no list, swallows the neighbours that are free like it."""
        before, after = block.before, block.after
        if before is not None and not before.in_use and before.mapped == block.mapped:
            self._remove(before)
            block.address, block.size, block.before = before.address, before.size + block.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.in_use and after.mapped == block.mapped:
            self._remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block

    def _add(self, block: _Block) -> None:
        insort(self._free, (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]


class _SegmentPool(_Pool):
    """The default: each segment is one cudaMalloc."""

    # The driver chooses addresses; here a later segment lies higher. Addresses only decide between blocks of one size.
    _next_address = 0

    def grow(self, size: int) -> _Block | None:
        if size <= _LARGEST_SMALL:
            segment = _SMALL_PAGE
        elif size < _OWN_SEGMENT:
            segment = _LARGE_PAGE
        else:
            segment = _round_up(size, _OWN_ROUNDING)
        if not self._card.take(segment):
            return None
        block = _Block(self._next_address, segment)
        self._next_address += segment
        return block

    def give_back(self) -> None:
        kept = []
        for size, address, block in self._free:
            if block.before is None and block.after is None:
                self._card.held -= size
            else:
                kept.append((size, address, block))
        self._free = kept


class _ExpandablePool(_Pool):
    """`expandable_segments:True`: one segment of addresses without end. Memory is put behind them page by page."""

    def __init__(self, card: _Card, page: int) -> None:
        super().__init__(card, split_above=0)
        self._page = page
        self._unmapped: list[tuple[int, _Block]] = [(0, _Block(0, _ADDRESSES, mapped=False))]

    def best_fit(self, size: int) -> _Block | None:
        index = bisect_left(self._free, (size,))
        if index == len(self._free):
            return None
        # A block that could grow counts as what it could grow to: the end of the segment is used last.
        while index + 1 < len(self._free) and _reach(self._free[index + 1][2]) < _reach(self._free[index][2]):
            index += 1
        return self._free.pop(index)[2]

    def grow(self, size: int) -> _Block | None:
        block = self._lowest_room(size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.after
            assert unmapped is not None
            # Pages mapped before a failure stay here as free memory; give_back() returns them.
            if not self._map(unmapped, min(unmapped.size, size - block.size)):
                return None
            block = unmapped  # it has swallowed the former one
        self._remove(block)
        return block

    def give_back(self) -> None:
        for _, _, block in list(self._free):
            first = _round_up(block.address, self._page)
            end = (block.address + block.size) // self._page * self._page
            if first >= end:
                continue
            self._remove(block)
            pages = block
            if first > block.address:
                pages = block.split(first - block.address)
                self._add(block)
            if pages.address + pages.size > end:
                self._add(pages.split(end - first))
            pages.mapped = False
            self._card.held -= pages.size
            self._merge(pages)
            self._add(pages)

    def _lowest_room(self, size: int) -> _Block:
        """The first block of the lowest stretch that is free, mapped or not, over `size` bytes and needs new pages."""
        for _, unmapped in self._unmapped:
            before = unmapped.before
            first = before if before is not None and not before.in_use else unmapped
            room = 0
            block: _Block | None = first
            while block is not None and not block.in_use and room < size:
                room, block = room + block.size, block.after
            if room >= size:
                return first
        raise AssertionError("addresses ran out")

    def _map(self, block: _Block, nbytes: int) -> bool:
        """Map pages behind at least the first `nbytes` of an unmapped block; False if the card lacks them."""
        pages = _round_up(nbytes, self._page)
        if not self._card.take(pages):
            return False
        self._remove(block)
        if pages < block.size:
            self._add(block.split(pages))
        block.mapped = True
        self._merge(block)
        self._add(block)
        return True

    def _add(self, block: _Block) -> None:
        if block.mapped:
            super()._add(block)
        else:
            insort(self._unmapped, (block.address, block))

    def _remove(self, block: _Block) -> None:
        if block.mapped:
            super()._remove(block)
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.address,))]


def _reach(block: _Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)
