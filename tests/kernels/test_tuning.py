"""A kernel's tile is measured once for its shapes; without a clock it is the first."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from moetune.kernels import tuning
from moetune.kernels.tuning import Tile, fastest

TILES = [Tile(128, 128, 32, 8, 4), Tile(64, 64, 32, 4, 3), Tile(32, 32, 32, 4, 3)]


@pytest.mark.parametrize(
    ("of_the_second", "chosen", "tried"), [(1.0, 1, 3), (torch.OutOfMemoryError("none left"), None, 2), (None, 0, 1)]
)
def test_the_fastest_is_measured_once(
    of_the_second: float | Exception | None, chosen: int | None, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tile does not compile. Where memory runs out, the tiles that had room are not the fastest of all."""
    measured: list[Tile] = []

    def milliseconds(tile: Tile, launch: Callable[[Tile], None]) -> float:
        measured.append(tile)
        if tile == TILES[2]:
            raise RuntimeError("out of shared memory")
        if tile == TILES[1] and isinstance(of_the_second, Exception):
            raise of_the_second
        return 0.0 if of_the_second is None else 2.0 if tile == TILES[0] else float(str(of_the_second))

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    monkeypatch.setattr(tuning, "_CHOSEN", {})
    for _ in range(2):
        if chosen is None:
            measured.clear()
            with pytest.raises(torch.OutOfMemoryError):
                fastest("rows", (4, 8), TILES, lambda _: None)
        else:
            assert fastest("rows", (4, 8), TILES, lambda _: None) == TILES[chosen]
    assert measured == TILES[:tried]
