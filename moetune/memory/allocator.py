"""Simulation of torch's CUDA caching allocator: bytes that allocations and frees reserve.

No GPU is needed. The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` with
default settings and a single stream; docs/concepts/allocator.md explains them and lists what is left out. All sizes are
in bytes; requests are first rounded up to multiples of 512.
"""

import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Allocator = Literal["default", "expandable"]
"""Configuration of torch's caching allocator: default segments, or `expandable_segments:True`."""

Event = tuple[int, int]
"""(id, bytes): a storage is allocated; (id, -1): it is freed. A storage of 0 bytes takes no memory."""

SMALLEST_BLOCK = 512  # kMinBlockSize
_LARGEST_SMALL = 1 << 20  # kSmallSize: largest request that is served by the small pool
POOLS = ((1, _LARGEST_SMALL), (_LARGEST_SMALL + 1, 1 << 60))
"""Least and most bytes of a request that each of the allocator's pools, of small and of large blocks, serves."""
SMALL_PAGE = 2 << 20  # kSmallBuffer
LARGE_PAGE = 20 << 20  # large_segment_size_
_OWN_SEGMENT = 10 << 20  # kMinLargeAlloc: requests of at least this size get a segment of their own
_OWN_ROUNDING = 2 << 20  # kRoundLarge
# torch reserves addresses for 9/8 of the GPU's memory. 2^60 exceeds any GPU, so that addresses never run out.
_ADDRESSES = 1 << 60


def allocator_here(unset: Allocator = "default") -> Allocator:
    """Return the allocator that PYTORCH_ALLOC_CONF or else PYTORCH_CUDA_ALLOC_CONF configures; `unset` if neither is
    set."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if settings is None:
        return unset
    return "expandable" if re.search(r"expandable_segments\s*:\s*true", settings, re.IGNORECASE) else "default"


@dataclass(frozen=True)
class Reserved:
    """Result of a simulation; all sizes in bytes.

    Attributes:
        peak_allocated: largest sum of blocks in use, as from `torch.cuda.max_memory_allocated`.
        peak_reserved: most GPU memory held by the allocator, in use or cached, as from
            `torch.cuda.max_memory_reserved`.
        reserved_at_end: GPU memory held by the allocator after the last event.
        cache_flushes: number of times that the GPU was full and the allocator returned all unused memory to the driver,
            which stalls the GPU.
        fits: False if a request failed even after a flush. The simulation stops there, as a process would for lack of
            memory.
    """

    peak_allocated: int
    peak_reserved: int
    reserved_at_end: int
    cache_flushes: int
    fits: bool


def peaks_with_holes(
    allocations: Callable[..., Iterable[Event]],
    workspaces: Sequence[int],
    rounded_peak: int,
    matrix: int,
    *,
    expandable: bool,
    capacity: int | None,
) -> tuple[int, int]:
    """Simulate a process's allocations behind its cuBLAS workspaces; return the peaks of allocated and of reserved
    bytes.

    Loading may leave a hole between the weights, so the largest reserved peak of three simulations is returned: with
    holes of 0, `matrix` and 8 · `matrix` bytes. If only the reserved bytes exceed `capacity`, the simulations that do
    are repeated with this limit, at which the allocator returns unused memory to the driver; if one fails even so, the
    bytes that it would have reserved count.

    Args:
        allocations: (hole, sizes) -> the events with a hole of these bytes, of storages of these sizes alone, as
            `Trace.allocations`.
        workspaces: bytes of each cuBLAS workspace.
        rounded_peak: the most bytes of the events that are alive at once, each rounded up to 512.
        matrix: bytes of the largest matrix that is quantized while weights are loaded.
    """
    holes = (0, matrix, 8 * matrix)

    def events(hole: int, sizes: tuple[int, int] | None = None) -> Iterator[Event]:
        for number, workspace in enumerate(workspaces):
            if sizes is None or sizes[0] <= workspace <= sizes[1]:
                yield -1 - number, workspace
        yield from allocations(hole, sizes)

    def played(hole: int, capacity: int | None) -> Reserved:
        return simulate(events(hole), expandable=expandable, capacity=capacity)

    @cache
    def of_pool(sizes: tuple[int, int], hole: int) -> int:
        return simulate(events(hole, sizes), expandable=expandable).peak_reserved

    if expandable:  # without a limit neither pool changes the other, and blocks are as large as what was requested
        allocated = rounded_peak + sum(workspaces)
        free = [sum(of_pool((low, high), hole if low <= hole <= high else 0) for low, high in POOLS) for hole in holes]
    else:
        unlimited = [played(hole, None) for hole in holes]
        allocated, free = unlimited[0].peak_allocated, [simulated.peak_reserved for simulated in unlimited]
    if capacity is None or not max(free) > capacity >= allocated:
        return allocated, max(free)
    most = 0
    for hole, reserved in zip(holes, free, strict=True):
        if reserved > capacity:
            limited = played(hole, capacity)
            if not limited.fits:
                return allocated, max(free)
            reserved = limited.peak_reserved
        most = max(most, reserved)
    return allocated, most


def simulate(events: Iterable[Event], *, expandable: bool, capacity: int | None = None) -> Reserved:
    """Simulate a sequence of allocations and frees and return the peaks.

    Args:
        events: allocations and frees in order. An id may be used again after its storage was freed.
        expandable: simulate `expandable_segments:True` instead of torch's default segments.
        capacity: bytes of GPU memory that the allocator may hold, which is the GPU's less what is used outside the
            allocator; None for no limit.
    """
    card = _Card(capacity)
    large: _Pool
    small: _Pool
    if expandable:
        large, small = _ExpandablePool(card, LARGE_PAGE), _ExpandablePool(card, SMALL_PAGE)
    else:
        large, small = _SegmentPool(card, split_above=_LARGEST_SMALL), _SegmentPool(card, split_above=0)

    alive: dict[int, tuple[_Pool, _Block] | None] = {}
    allocated = peak_allocated = flushes = 0
    fits = True
    for key, nbytes in events:
        if nbytes < 0:
            if (held := alive.pop(key)) is not None:
                pool, dead = held
                allocated -= dead.size
                pool.release(dead)
            continue
        assert key not in alive, f"storage {key} is born twice"
        if nbytes == 0:
            alive[key] = None
            continue
        size = -(-nbytes // SMALLEST_BLOCK) * SMALLEST_BLOCK  # no calls that can be spared: millions of events
        pool = small if size <= _LARGEST_SMALL else large
        block = pool.best_fit(size) or pool.grow(size)
        if block is None:
            flushes += 1
            large.give_back()
            small.give_back()
            block = pool.grow(size)
            if block is None:
                fits = False
                break
        alive[key] = (pool, block)
        allocated += block.size
        if allocated > peak_allocated:
            peak_allocated = allocated
    return Reserved(peak_allocated, card.peak, card.held, flushes, fits)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class _Card:
    """GPU memory that the driver hands out through cudaMalloc and cuMemCreate; `capacity` None means no limit."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.held = 0
        self.peak = 0

    def take(self, nbytes: int) -> bool:
        """Reserve `nbytes`; return False, reserving nothing, if that exceeds the capacity."""
        if self.capacity is not None and self.held + nbytes > self.capacity:
            return False
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return True


class _Block:
    """A contiguous address range: in use, free, or (in an expandable segment) free and not backed by memory.

    `before` and `after` are the adjacent blocks in the same segment; None at its ends. `mapped` is whether memory backs
    it.
    """

    __slots__ = ("address", "after", "before", "in_use", "mapped", "size")

    def __init__(
        self,
        address: int,
        size: int,
        before: "_Block | None" = None,
        after: "_Block | None" = None,
        *,
        mapped: bool = True,
    ) -> None:
        self.address = address
        self.size = size
        self.before = before
        self.after = after
        self.mapped = mapped
        self.in_use = False

    def split(self, size: int) -> "_Block":
        """Shrink this block to its first `size` bytes and return a new block with the remaining bytes."""
        after = self.after
        rest = _Block(self.address + size, self.size - size, self, after, mapped=self.mapped)
        if after is not None:
            after.before = rest
        self.after = rest
        self.size = size
        return rest


class _Pool(ABC):
    """Base class of a memory pool: its free blocks, sorted by size and then address for a best-fit search by bisection.

    The allocator has two pools, for requests up to 1 MiB and for larger ones. Both take memory from one card, and
    blocks never move between them. A block is split if it has more than `split_above` bytes beyond a request.
    """

    def __init__(self, card: _Card, split_above: int) -> None:
        self._card = card
        self._split_above = split_above
        self._free: list[tuple[int, int, _Block]] = []

    def best_fit(self, size: int) -> _Block | None:
        """Use the smallest free block of at least `size` bytes, cut to them; return it, or None if there is none."""
        index = bisect_left(self._free, (size,))
        return self._cut(self._free.pop(index)[2], size) if index < len(self._free) else None

    @abstractmethod
    def grow(self, size: int) -> _Block | None:
        """Reserve more memory, and use a block of it cut to `size` bytes; return the block, or None if the card has too
        little memory left."""

    @abstractmethod
    def give_back(self) -> None:
        """Give all memory in which no block is in use back to the card."""

    def _cut(self, block: _Block, size: int) -> _Block:
        """Mark `block`, which is in no list, as in use and return it; if it has over `split_above` bytes beyond `size`,
        these become a free block."""
        block.in_use = True
        if block.size - size > self._split_above:
            rest = block.split(size)
            insort(self._free, (rest.size, rest.address, rest))
        return block

    def release(self, block: _Block) -> None:
        """Free `block`, merge it with free neighbours, and add the result to the free list."""
        block.in_use = False
        self._merge(block)
        insort(self._free, (block.size, block.address, block))

    def _merge(self, block: _Block) -> None:
        """Extend `block`, which is in no list, by its free neighbours and remove these from their lists."""
        before, after = block.before, block.after
        if before is not None and not before.in_use and before.mapped == block.mapped:
            self._remove(before)
            block.address = before.address
            block.size += before.size
            block.before = before = before.before
            if before is not None:
                before.after = block
        if after is not None and not after.in_use and after.mapped == block.mapped:
            self._remove(after)
            block.size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block

    def _remove(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]


class _SegmentPool(_Pool):
    """Pool with torch's default segments: each segment is one cudaMalloc and is never extended."""

    # The driver chooses addresses; here later segments get higher ones. Addresses only order blocks of equal size.
    _next_address = 0

    def grow(self, size: int) -> _Block | None:
        if size <= _LARGEST_SMALL:
            segment = SMALL_PAGE
        elif size < _OWN_SEGMENT:
            segment = LARGE_PAGE
        else:
            segment = _round_up(size, _OWN_ROUNDING)
        if not self._card.take(segment):
            return None
        block = _Block(self._next_address, segment)
        self._next_address += segment
        return self._cut(block, size)

    def give_back(self) -> None:
        """Give each segment that is entirely free back to the card."""
        kept = []
        for size, address, block in self._free:
            if block.before is None and block.after is None:
                self._card.held -= size
            else:
                kept.append((size, address, block))
        self._free = kept


class _ExpandablePool(_Pool):
    """Pool with `expandable_segments:True`: a single segment with unlimited addresses, backed by memory page by page. A
    `page` has 20 MiB in the large pool and 2 MiB in the small one."""

    def __init__(self, card: _Card, page: int) -> None:
        super().__init__(card, split_above=0)
        self._page = page
        self._unmapped: list[tuple[int, _Block]] = [(0, _Block(0, _ADDRESSES, mapped=False))]

    def best_fit(self, size: int) -> _Block | None:
        free = self._free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        # As in torch, a block that can grow is compared by the size that it can reach: the segment's end is used last.
        while (block := free[index][2]).after is not None and not block.after.mapped and index + 1 < len(free):
            if _reach(free[index + 1][2]) >= _reach(block):
                break
            index += 1
        del free[index]
        return self._cut(block, size)

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
            block = unmapped  # _map() has merged the former block into it
        self._remove(block)
        return self._cut(block, size)

    def give_back(self) -> None:
        """Give each page that lies entirely inside a free block back to the card."""
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
        """Return the first block of the lowest free range that spans `size` bytes and contains unmapped addresses."""
        for _, unmapped in self._unmapped:
            before = unmapped.before
            first = before if before is not None and not before.in_use else unmapped
            free = 0
            block: _Block | None = first
            while block is not None and not block.in_use and free < size:
                free, block = free + block.size, block.after
            if free >= size:
                return first
        raise AssertionError("addresses ran out")

    def _map(self, block: _Block, nbytes: int) -> bool:
        """Map pages to at least the first `nbytes` of an unmapped block; return False if the card is too full."""
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
            insort(self._free, (block.size, block.address, block))
        else:
            insort(self._unmapped, (block.address, block))

    def _remove(self, block: _Block) -> None:
        if block.mapped:
            del self._free[bisect_left(self._free, (block.size, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.address,))]


def _reach(block: _Block) -> int:
    """Return the size in bytes to which a free block could grow: its own, plus that of an unmapped block right after
    it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)
