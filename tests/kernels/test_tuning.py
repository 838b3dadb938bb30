"""A kernel's tile is measured once for a card and its shapes, and kept on disk; without a clock it is the first."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from moetune.cache import read_cached
from moetune.kernels import tuning
from moetune.kernels.tuning import Tile, fastest

TILES = [Tile(128, 128, 32, 8, 4), Tile(64, 64, 32, 4, 3), Tile(32, 32, 32, 4, 3)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The choices of a card on which the second tile takes least time and the last does not compile."""

    def milliseconds(tile: Tile, launch: Callable[[Tile], None]) -> float:
        launch(tile)
        if tile == TILES[2]:
            raise RuntimeError("out of shared memory")
        return float(tile.rows)

    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    monkeypatch.setattr(tuning, "_has_clock", lambda: True)
    monkeypatch.setattr(tuning, "_card", lambda: "a card")
    monkeypatch.setattr(tuning, "_CHOSEN", {})
    return tmp_path / "cache" / "tiles.json.gz"


def asked(monkeypatch: pytest.MonkeyPatch, *shapes: int) -> tuple[Tile, list[Tile]]:
    """The tile that a new process takes, and those that it launches to find it."""
    launched: list[Tile] = []
    monkeypatch.setattr(tuning, "_CHOSEN", {})
    return fastest("rows", shapes, TILES, launched.append), launched


def test_a_choice_is_measured_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, 4, 8) == (TILES[1], TILES)
    assert asked(monkeypatch, 4, 8) == (TILES[1], [])
    assert asked(monkeypatch, 4, 9) == (TILES[1], TILES)
    assert read_cached(file, tuning._Content) == {"a card": {"rows (4, 8)": [*TILES[1]], "rows (4, 9)": [*TILES[1]]}}
    monkeypatch.setattr(tuning, "_card", lambda: "another")
    assert asked(monkeypatch, 4, 8)[1] == TILES
    assert len(read_cached(file, tuning._Content)) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"a card": 3}', '{"a card": {"rows (4, 8)": [7, 7, 7, 1, 1]}}'])
def test_a_file_that_is_damaged_is_written_anew(file: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.mkdir()
    file.write_text(content)
    assert asked(monkeypatch, 4, 8) == (TILES[1], TILES)
    assert read_cached(file, tuning._Content)["a card"]["rows (4, 8)"] == [*TILES[1]]


def test_without_memory_nothing_is_chosen(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that had room are not kept as the fastest of all."""

    def milliseconds(tile: Tile, launch: Callable[[Tile], None]) -> float:
        if tile == TILES[1]:
            raise torch.OutOfMemoryError("out of memory")
        return 1.0

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    with pytest.raises(torch.OutOfMemoryError):
        asked(monkeypatch, 4, 8)
    assert not file.exists()


def test_without_a_clock_nothing_is_measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_has_clock", lambda: False)
    assert asked(monkeypatch, 4, 8) == (TILES[0], [])
    assert not file.exists()


def test_a_folder_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.write_text("a file")
    assert asked(monkeypatch, 4, 8) == (TILES[1], TILES)
