"""Parameters of tests with many cases, of which a push runs some, and `--all` all."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def thinned(cases: Iterable[str], every: int = 3, always: Collection[str] = ()) -> list[Any]:
    """Return the cases as parameters of a test; only each `every`-th one and those in `always` run on a push."""
    return [
        case if case in always or not number % every else pytest.param(case, marks=pytest.mark.full)
        for number, case in enumerate(cases)
    ]


def in_pairs(*axes: Iterable[Any], every: int = 3) -> list[Any]:
    """Return all combinations of a value of each axis, as parameters of a test; about one in `every` runs on a push.

    With at least `every` values on each of three axes, each pair of values of two axes is in one that runs on a push.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        pytest.param(*(value for _, value in case), marks=[pytest.mark.full] * bool(sum(n for n, _ in case) % every))
        for case in product(*numbered)
    ]
