"""The command `chat`, as a user types to it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # Python's own of a UTF-8 locale, and of none
def test_a_line_that_is_not_utf_8(
    errors: str, small_model: Path, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a \xff router\n"), "utf-8", errors))
    ended = moetune("chat", small_model, "--max-new-tokens", "1")
    assert (ended.code, ended.out, "not UTF-8" in ended.err) == (2, "", True), ended.err
    assert "Traceback" not in ended.err
