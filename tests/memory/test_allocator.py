"""The caching allocator's rules, each in a scenario worked out by hand, then against a slow version of the rules."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.memory.allocator import POOLS, Event, Reserved, peaks_with_holes, simulate

MIB = 1 << 20


def play(*events: tuple[int, float], expandable: bool = False, capacity: float | None = None) -> Reserved:
    """Sizes in MiB; a size of -1 is a death."""
    return simulate(
        [(key, -1 if size == -1 else int(size * MIB)) for key, size in events],
        expandable=expandable,
        capacity=None if capacity is None else int(capacity * MIB),
    )


@pytest.mark.parametrize(
    ("expandable", "nbytes", "allocated", "reserved"),
    [
        (False, 1, 512, 2 * MIB),  # rounded to 512 bytes, in a segment of 2 MiB
        (False, 513, 1024, 2 * MIB),
        (False, MIB, MIB, 2 * MIB),  # the largest small request
        (False, MIB + 1, MIB + 512, 20 * MIB),  # the smallest large one
        (False, 10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (False, 10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounds to 10 MiB, which has a segment of its own
        (False, 10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # 2 MiB - 512 left over: cut off
        (False, 11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB left over is not cut off: it counts as allocated
        (False, 11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # 512 bytes more are
        (False, 30 * MIB, 30 * MIB, 30 * MIB),
        (True, 1, 512, 2 * MIB),
        (True, MIB, MIB, 2 * MIB),
        (True, MIB + 1, MIB + 512, 20 * MIB),
        (True, 11 * MIB, 11 * MIB, 20 * MIB),  # any rest is cut off
        (True, 20 * MIB, 20 * MIB, 20 * MIB),
        (True, 20 * MIB + 1, 20 * MIB + 512, 40 * MIB),
    ],
)
def test_one_storage(expandable: bool, nbytes: int, allocated: int, reserved: int) -> None:
    assert simulate([(0, nbytes)], expandable=expandable) == Reserved(allocated, reserved, reserved, 0, True)


@pytest.mark.parametrize("expandable", [False, True])
def test_an_id_may_live_twice_but_not_at_once(expandable: bool) -> None:
    again = play((0, 20), (0, -1), (0, 20), expandable=expandable)
    assert again.peak_allocated == again.peak_reserved == 20 * MIB
    with pytest.raises(AssertionError, match="storage 0 is born twice"):
        play((0, 20), (0, 20), expandable=expandable)


def test_a_full_card_gets_unused_segments_back() -> None:
    assert play((0, 20), (0, -1), (1, 24), capacity=43) == Reserved(24 * MIB, 24 * MIB, 24 * MIB, 1, True)
    assert play((0, 20), (0, -1), (1, 24), capacity=44) == Reserved(24 * MIB, 44 * MIB, 44 * MIB, 0, True)


def test_a_segment_in_part_use_is_not_given_back() -> None:
    # 1.5 MiB keep a segment of 20 MiB, of which 18.5 are free; 24 more exceed 40.
    trace = [(0, 1.5), (1, 18), (1, -1), (2, 24)]
    assert play(*trace, capacity=40) == Reserved(20 * MIB, 20 * MIB, 20 * MIB, 1, False)
    # An expandable segment grows by one page instead.
    assert play(*trace, expandable=True, capacity=40) == Reserved(int(25.5 * MIB), 40 * MIB, 40 * MIB, 0, True)


@pytest.mark.parametrize("expandable", [False, True])
def test_too_much_ends_the_simulation(expandable: bool) -> None:
    result = play((0, 20), (1, 30), (2, 1), expandable=expandable, capacity=40)
    assert result == Reserved(20 * MIB, 20 * MIB, 20 * MIB, 1, False)


def test_a_full_card_gets_whole_free_pages_back() -> None:
    # 1.5 MiB and 50 MiB on three pages; without the 50 MiB two of them are free. A small storage needs 2 MiB more.
    trace = [(0, 1.5), (1, 50), (1, -1), (2, 1 / 1024)]
    result = play(*trace, expandable=True, capacity=60)
    assert result == Reserved(int(51.5 * MIB), 60 * MIB, 22 * MIB, 1, True)
    # 30 MiB more: 18.5 MiB free and one page.
    assert play(*trace, (3, 30), expandable=True, capacity=60).reserved_at_end == 42 * MIB


def test_a_gap_without_pages_is_filled_first() -> None:
    # Of three pages the middle one is given back for a small storage, and mapped again for the 20 MiB of 4.
    trace = [(0, 20), (1, 20), (2, 20), (1, -1), (3, 1 / 1024), (3, -1), (4, 20)]
    result = play(*trace, expandable=True, capacity=60)
    assert (result.reserved_at_end, result.cache_flushes, result.fits) == (60 * MIB, 2, True)
    # Pages 0 and 1 then make room for 40 MiB. Were 4 at the end of the segment, they would not.
    assert play(*trace, (0, -1), (4, -1), (5, 40), expandable=True, capacity=60).fits


def test_a_gap_without_pages_joins_the_free_memory_after_it() -> None:
    # 30 free, 10 in use, on two pages; the first is given back, 10 MiB of the second stay. Together they hold 30 again.
    trace = [(0, 30), (1, 10), (0, -1), (2, 1 / 1024), (2, -1), (3, 30)]
    result = play(*trace, expandable=True, capacity=40)
    assert result == Reserved(40 * MIB, 40 * MIB, 40 * MIB, 2, True)


# Any trace, and the rules once more with lists and scans only.

SIZES = st.one_of(
    st.sampled_from(
        [0, 1, 512, MIB - 511, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 11 * MIB, 20 * MIB, 21 * MIB]
    ),
    st.integers(1, 2 * MIB),
    st.integers(1, 60 * MIB),
)


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Births, and deaths of storages that live."""
    events: list[Event] = []
    alive: list[int] = []
    for key in range(draw(st.integers(0, 40))):
        for _ in range(min(len(alive), draw(st.integers(0, 2)))):
            dying = draw(st.integers(0, len(alive) - 1))
            events.append((alive.pop(dying), -1))
        events.append((key, draw(SIZES)))
        alive.append(key)
    return events


def with_all_deaths(events: list[Event]) -> list[Event]:
    dead = {key for key, nbytes in events if nbytes == -1}
    return events + [(key, -1) for key, nbytes in events if nbytes != -1 and key not in dead]


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def split_and_merged(segment: list[list[int | None]]) -> list[list[int | None]]:
    """A segment of [bytes, owner] with free neighbours joined."""
    joined: list[list[int | None]] = []
    for size, owner in segment:
        if joined and owner is None and joined[-1][1] is None:
            joined[-1][0] += size
        else:
            joined.append([size, owner])
    return joined


def slowly(events: Iterable[Event], expandable: bool) -> tuple[int, int]:
    """(peak allocated, peak reserved) without a limit, where segments never shrink."""
    pools: dict[bool, list[list[list[int | None]]]] = {True: [], False: []}
    peak = 0
    for key, nbytes in events:
        if nbytes == 0:
            continue
        if nbytes == -1:
            for segments in pools.values():
                for number, segment in enumerate(segments):
                    segments[number] = split_and_merged(
                        [[size, None if owner == key else owner] for size, owner in segment]
                    )
            continue
        size = rounded(nbytes)
        small = size <= MIB
        segments = pools[small]
        free = [
            # In an expandable segment the end counts as endless.
            (expandable and place == len(segment) - 1, block[0], number, place)
            for number, segment in enumerate(segments)
            for place, block in enumerate(segment)
            if block[1] is None and block[0] >= size
        ]
        if free:
            *_, number, place = min(free)
        elif expandable:
            page = 2 * MIB if small else 20 * MIB
            segments[:] = segments or [[]]
            end = segments[0][-1] if segments[0] and segments[0][-1][1] is None else None
            missing = size - (end[0] if end else 0)
            segments[0] = split_and_merged([*segments[0], [-(-missing // page) * page, None]])
            number, place = 0, len(segments[0]) - 1
        else:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segments.append([[length, None]])
            number, place = len(segments) - 1, 0
        block = segments[number][place]
        rest = block[0] - size
        if rest > (0 if small or expandable else MIB):
            segments[number][place : place + 1] = [[size, key], [rest, None]]
        else:
            block[1] = key
        blocks = [block for segments in pools.values() for segment in segments for block in segment]
        peak = max(peak, sum(size for size, owner in blocks if owner is not None))
    return peak, sum(size for segments in pools.values() for segment in segments for size, _ in segment)


@given(traces(), st.booleans())
def test_equals_the_slow_version(events: list[Event], expandable: bool) -> None:
    result = simulate(events, expandable=expandable)
    assert (result.peak_allocated, result.peak_reserved) == slowly(events, expandable)
    assert result.reserved_at_end == result.peak_reserved
    assert result.fits


@given(traces(), st.booleans())
def test_without_a_limit_each_pool_can_be_simulated_alone(events: list[Event], expandable: bool) -> None:
    size_of = {key: nbytes for key, nbytes in events if nbytes >= 0}  # no key is used twice
    alone = [[one for one in events if low <= size_of[one[0]] <= high] for low, high in POOLS]
    reserved = sum(simulate(pool, expandable=expandable).peak_reserved for pool in alone)
    assert reserved == simulate(events, expandable=expandable).peak_reserved


@given(traces(), st.booleans(), st.integers(0, 300 * MIB))
def test_capacity_is_respected(events: list[Event], expandable: bool, capacity: int) -> None:
    free = simulate(events, expandable=expandable)
    limited = simulate(events, expandable=expandable, capacity=capacity)
    assert limited.peak_reserved <= capacity
    if capacity >= free.peak_reserved:
        assert limited == free
    else:
        assert limited.cache_flushes > 0


@given(traces(), st.booleans(), st.integers(0, 300 * MIB))
def test_all_that_died_can_be_had_again(events: list[Event], expandable: bool, extra: int) -> None:
    """However pages and segments were cut, moved and given back: a card without storages serves one of its size."""
    capacity = 60 * MIB + extra // (20 * MIB) * 20 * MIB
    done = with_all_deaths(events)
    if simulate(done, expandable=expandable, capacity=capacity).fits:
        result = simulate([*done, (-7, capacity)], expandable=expandable, capacity=capacity)
        assert result.fits
        assert result.reserved_at_end == capacity


def test_fragments_that_no_flush_frees_count() -> None:
    """46 MiB are allocated of 60, but the 16 of them fit neither between the two blocks of 15 nor after them. What the
    allocator would have reserved then counts, as such a process runs out of memory."""
    events = [(0, 15 * MIB), (1, 15 * MIB), (2, 15 * MIB), (1, -1), (3, 16 * MIB)]
    none = [(-1000, 0), (-1000, -1)]  # the hole that loading leaves

    def allocations(hole: int, sizes: tuple[int, int] | None) -> list[Event]:
        return [*none, *(event for event in events if sizes is None or sizes[0] > MIB)]

    for capacity in (None, 80 * MIB, 60 * MIB):  # not 60, which would fit
        peaks = peaks_with_holes(allocations, [], 46 * MIB, 0, expandable=True, capacity=capacity)
        assert peaks == (46 * MIB, 80 * MIB)
