"""The last size that fits is found wherever it is, by few predictions."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from moetune.planning.fit import headroom, last_that_fits


@pytest.mark.parametrize("shape", ["line", "curve", "steps"])
def test_the_last_that_fits_is_found_wherever_it_is(shape: str) -> None:
    heights = {"line": lambda n: 7 * n, "curve": lambda n: n * n * n, "steps": lambda n: n // 8 * 100}
    draw = random.Random(0)
    for _ in range(200):
        count, border = draw.randrange(1, 300), draw.randrange(-3, 320)
        room = heights[shape](border) if border >= 0 else -1
        asked: list[int] = []

        def predicted(number: int, room: int = room, asked: list[int] = asked) -> Any:
            asked.append(number)
            return SimpleNamespace(headroom_bytes=room - heights[shape](number), host=None)

        fits = [number for number in range(count) if heights[shape](number) <= room]
        known = {number: predicted(number) for number in draw.sample(range(count), min(count, draw.randrange(3)))}
        asked.clear()
        last, reports = last_that_fits(count, predicted, headroom, draw.randrange(count), known=known)
        assert last == (fits[-1] if fits else -1)
        assert last + 1 == count or last + 1 in reports
        assert last < 0 or last in reports
        assert not {*known} & {*asked}
        assert len(asked) == len(set(asked)) <= 40


def test_a_line_takes_four_predictions() -> None:
    """Memory is a straight line."""
    for room in range(40, 1040, 37):
        asked: list[int] = []

        def predicted(number: int, room: int = room, asked: list[int] = asked) -> Any:
            asked.append(number)
            return SimpleNamespace(headroom_bytes=room - 40 - 10 * number, host=None)

        last, _ = last_that_fits(200, predicted, headroom)
        assert last == min((room - 40) // 10, 199)
        assert len(asked) <= 4
