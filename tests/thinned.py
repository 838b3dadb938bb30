"""Part of a large set of cases on a push, the rest with `--all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[str], every: int = 3, always: Collection[str] = ()) -> list[Any]:
    """Parameters of a test: every so many-th case, and those that are always run; the others are marked `full`."""
    return [
        case if case in always or not number % every else pytest.param(case, marks=pytest.mark.full)
        for number, case in enumerate(cases)
    ]
