"""A plan as a whole: its notes, and what several processes find."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.planning.plan import plan
from moetune.planning.search import Search
from moetune.planning.strategies import Strategy


@pytest.mark.full
def test_several_processes_find_what_one_finds(small_model: Path) -> None:
    one, several = (plan(str(small_model), "600MiB", length=64, processes=number) for number in (1, 2))
    assert several == one
    assert one.candidates


@pytest.mark.full
def test_what_is_refused_for_one_reason_is_one_note(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(search: Search, strategy: Strategy, more_than: int) -> None:
        raise UserError("no such strategy today")

    monkeypatch.setattr(Search, "largest", refuse)
    refused = plan(str(small_model), "600MiB", goals=("router",), length=64)
    assert refused.notes == ("router, bf16, adamw; int8, adamw; nf4, adamw; nf4, host, adamw: no such strategy today",)
