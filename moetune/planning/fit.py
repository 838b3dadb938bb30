"""`last_that_fits`: the one search for how large a run may be, over sizes.

A prediction takes about a second, so few are made: a straight line through two of them says where memory reaches the
card's size, and the next prediction is made there, until a size that fits is known beside one that does not.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from moetune.memory.report import MemoryReport


def last_that_fits(
    count: int,
    predict: Callable[[int], MemoryReport],
    left: Callable[[MemoryReport], int],
    start: int = 0,
    *,
    sizes: Sequence[float] | None = None,
    known: Mapping[int, MemoryReport] | None = None,
) -> tuple[int, dict[int, MemoryReport]]:
    """Find the last of the numbers 0 to `count` - 1 that fits, where each number needs more memory than the one before.

    Args:
        count: how many numbers there are.
        predict: predicts the memory for a number.
        left: returns the bytes that a run leaves free, negative if it does not fit.
        start: the number to predict first.
        sizes: for each number, ascending, a size with which memory grows about linearly; None: the number itself.
        known: number -> report, of those that were predicted before.

    Returns the number, -1 if none fits; and number -> report of all that are known, among them this number, unless
    none fits, and the next one, unless all fit.
    """
    reports, sizes = dict(known or {}), sizes or range(1, count + 1)
    for tries in range(count + 1):
        fits = max((number for number, report in reports.items() if left(report) >= 0), default=-1)
        fails = min((number for number, report in reports.items() if left(report) < 0), default=count)
        if fails - fits <= 1:
            break
        if start not in reports and not tries:
            number = start
        elif tries > 5 and tries % 2:  # where memory is far from a line, halving ends the search
            number = (fits + fails) // 2
        else:
            number = _crossing({number: left(report) for number, report in reports.items()}, sizes)
        number = min(max(number, fits + 1), fails - 1)
        reports[number] = predict(number)
    return fits, reports


def _crossing(free: Mapping[int, int], sizes: Sequence[float]) -> int:
    """Return the number at which a straight line through the two known headrooms nearest to zero crosses zero; with
    only one known headroom, a number beyond it if it fits, so far that the line through both is of use, half if not."""
    nearest, *others = sorted(free, key=lambda number: abs(free[number]))
    if others:
        per_size = (free[nearest] - free[others[0]]) / (sizes[others[0]] - sizes[nearest])
        if per_size > 0:
            return bisect_right(sizes, sizes[nearest] + free[nearest] / per_size) - 1
    return nearest + max(nearest + 1, len(sizes) // 32) if free[nearest] >= 0 else nearest // 2


def headroom(report: MemoryReport) -> int:
    """Return the bytes that a run is expected to leave free, of its GPU or its host, whichever is less; negative if it
    needs more than there is."""
    assert report.headroom_bytes is not None
    on_host = None if report.host is None else report.host.left
    return report.headroom_bytes if on_host is None else min(report.headroom_bytes, on_host)


def surely_left(report: MemoryReport) -> int:
    """Return the bytes left free on GPU or host, whichever has less, if the run needs the most that it may; negative if
    that does not fit."""
    on_host = None if report.host is None else report.host.surely_left
    return report.least_headroom if on_host is None else min(report.least_headroom, on_host)
