"""Importing torch and its like in two thirds of the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Around imports that bring half a million objects, all of which stay: Python does not look for garbage among them,
    neither while they come nor later."""
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    if len(sys.modules) > known:  # to ask how many are frozen already would count them
        gc.freeze()
