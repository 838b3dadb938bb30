"""Which of a kernel's tiles is fastest, measured once for each card and shape.

Choices are kept on disk, in `tiles.json.gz` in moetune's cache folder (`cache_folder`), by card, version of Triton and
shapes. A file that cannot be read counts as empty, and one that cannot be written is left. Import this file only with a
GPU and Triton.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from moetune.cache import cache_folder, read_cached, write_cached


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


_Content = dict[str, dict[str, list[int]]]
_CHOSEN: dict[Hashable, Tile] = {}
"""(kernel, shapes) -> the tile chosen in this process."""


def fastest(kernel: str, shapes: tuple[Hashable, ...], tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> Tile:
    """Return the tile with which a kernel is fastest; measured if neither this process nor the file knows it.

    `shapes` is everything that the choice depends on. `launch` launches the kernel with a tile; each call overwrites
    the result of the last. The first tile must compile; others that do not are left out. On a device that does not
    measure time, the first is chosen.
    """
    key = kernel, shapes
    if key not in _CHOSEN:
        name = f"{kernel} {shapes}"
        kept = _read().get(_card(), {}).get(name)
        known = next((tile for tile in tiles if list(tile) == kept), tiles[0])
        if list(known) != kept and _has_clock():
            known = _measured(tiles, launch)
            _keep(name, known)
        _CHOSEN[key] = known
    return _CHOSEN[key]


def _measured(tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> Tile:
    """Return the tile whose launches take the least time, without those that fail to compile or launch.

    An error of the first tile is raised, and so is a lack of memory with any tile: the fastest of the tiles that
    happened to fit must not be recorded.
    """
    first, *rest = tiles
    times = {first: _milliseconds(first, launch)}
    for tile in rest:
        try:
            times[tile] = _milliseconds(tile, launch)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # too large for this card: compiler and driver raise errors of any type
            continue
    return min(times, key=times.__getitem__)


def _milliseconds(tile: Tile, launch: Callable[[Tile], None], repetitions: int = 5) -> float:
    """Return the time in milliseconds of `repetitions` launches, after a first one that compiles."""
    launch(tile)
    begin, end = _events(2)
    begin.record()
    for _ in range(repetitions):
        launch(tile)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@cache
def _has_clock() -> bool:
    """Return whether the device measures time: whether the last of eight events is later than the first."""
    events = _events(8)
    for event in events:
        event.record()
    while not events[-1].query():
        pass  # microseconds
    return events[0].elapsed_time(events[-1]) > 0


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def _read() -> dict[str, dict[str, list[int]]]:
    """Return the content of the file, card -> (kernel and shapes -> tile); empty if the file is missing or damaged."""
    return read_cached(_file(), _Content) or {}


def _keep(name: str, tile: Tile) -> None:
    """Add the tile of a kernel and its shapes (`name`) to the file; does nothing if the file cannot be written."""
    content = _read()
    content.setdefault(_card(), {})[name] = list(tile)
    write_cached(_file(), _Content, content)


def _file() -> Path:
    return cache_folder("tiles") / "tiles.json.gz"


@cache
def _card() -> str:
    """Return the GPU's name and Triton's version, by which the file is divided."""
    return f"{torch.cuda.get_device_name()}, Triton {triton.__version__}"
