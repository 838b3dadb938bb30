"""The fastest tile of a kernel, measured once in a process for each shape.

Import this file only with a GPU and Triton, which keeps compiled kernels on disk: another process measures again, but
compiles nothing.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """Sizes of a program's share of a matrix product, and Triton's options for it.

    Attributes:
        rows, wide: rows and columns of the result.
        deep: terms that are summed at a time.
        num_warps: warps of 32 threads.
        num_stages: stages of the loop's software pipeline.
    """

    rows: int
    wide: int
    deep: int
    num_warps: int
    num_stages: int


def tiled(tiles: Sequence[Tile]) -> Callable[[Any], Any]:
    """Return a decorator that lists, as attribute `tiles`, those a function chooses from if called without `tile`."""

    def define(function: Any) -> Any:
        function.tiles = tiles
        return function

    return define


_CHOSEN: dict[Hashable, Tile] = {}
"""(kernel, shapes) -> the tile chosen in this process."""


def fastest(kernel: str, shapes: tuple[Hashable, ...], tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> Tile:
    """Return the tile with which a kernel is fastest; measured at the first call with these shapes.

    `shapes` is everything that the choice depends on. `launch` launches the kernel with a tile; each call overwrites
    the result of the last. The first tile must compile; others that do not are left out. On a device that does not
    measure time, the first is chosen.

    An error of the first tile is raised, and so is a lack of memory with any tile: the fastest of the tiles that
    happened to fit must not be chosen.
    """
    key = kernel, shapes
    if key not in _CHOSEN:
        first, *others = tiles
        times = {first: _milliseconds(first, launch)}
        for tile in others if times[first] else ():
            try:
                times[tile] = _milliseconds(tile, launch)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # too large for this card: compiler and driver raise errors of any type
                continue
        _CHOSEN[key] = min(times, key=times.__getitem__)
    return _CHOSEN[key]


def _milliseconds(tile: Tile, launch: Callable[[Tile], None], repetitions: int = 5) -> float:
    """Return the time in milliseconds of `repetitions` launches, after a first one that compiles."""
    launch(tile)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repetitions):
        launch(tile)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
