"""The cache on disk: what was written is read, or nothing is, and a new file takes its place."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from moetune.cache import file_of, read_cached, write_cached
from moetune.memory.unknowns import Span

SPAN = Span(1, 20, 300)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda file: file.unlink(),
    "a key": lambda file: file.write_bytes(gzip.compress(b'{"lo": 1, "expected": 20, "high": 300}')),
    "a byte": lambda file: file.write_bytes(file.read_bytes()[:-9] + bytes([file.read_bytes()[-9] ^ 1]) + b"12345678"),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "empty": lambda file: file.write_bytes(b""),
    "no gzip": lambda file: file.write_bytes(b"{}"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_read_is_what_was_written(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.json.gz"
    write_cached(file, Span, SPAN)
    assert read_cached(file, Span) == SPAN
    DAMAGE[damage](file)
    assert read_cached(file, Span) is None
    write_cached(file, Span, Span(2, 2, 2))
    assert read_cached(file, Span) == (None if damage == "a folder" else Span(2, 2, 2))


def test_another_type_is_not_read(tmp_path: Path) -> None:
    write_cached(tmp_path / "a", tuple[int, Span | None], (3, None))
    assert read_cached(tmp_path / "a", tuple[int, Span | None]) == (3, None)
    assert read_cached(tmp_path / "a", Span) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_cached(tmp_path / "file" / "a", Span, SPAN)
    assert read_cached(tmp_path / "file" / "a", Span) is None


def test_names_depend_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {file_of({"a": 1}), file_of({"a": 2})}
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    names.add(file_of({"a": 1}))
    monkeypatch.setattr("moetune.cache.source_digest", lambda pattern: "other")
    names.add(file_of({"a": 1}))
    assert len(names) == 4
