"""Part of a large set of cases on a push, the rest with `--all`."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def thinned(cases: Iterable[str], every: int = 3, always: Collection[str] = ()) -> list[Any]:
    """Parameters of a test: every so many-th case, and those that are always run; the others are marked `full`."""
    return [
        case if case in always or not number % every else pytest.param(case, marks=pytest.mark.full)
        for number, case in enumerate(cases)
    ]


def in_pairs(*axes: Iterable[Any], every: int = 3) -> list[Any]:
    """All combinations of a value of each axis. About every third is run on a push: of three axes with at least three
    values, each value is then run beside each value of another axis. The others are marked `full`."""
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        pytest.param(*(value for _, value in case), marks=[pytest.mark.full] * bool(sum(n for n, _ in case) % every))
        for case in product(*numbered)
    ]
