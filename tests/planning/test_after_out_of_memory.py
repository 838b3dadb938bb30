"""What would have fitted: nothing that wants more host memory than there is."""

from pathlib import Path

import pytest

from moetune.models.catalog.gpus import Figure, find_gpu
from moetune.planning import after_out_of_memory
from moetune.planning.savings import is_setting_of_host
from moetune.run.resolve import resolve
from tests import small


@pytest.mark.full
@pytest.mark.parametrize(
    ("room", "is_named"), [pytest.param(None, True, marks=pytest.mark.full), (10**12, True), (0, False)]
)
def test_offload_needs_room_on_the_host(
    room: int | None, is_named: bool, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_out_of_memory, "this_machine", lambda: None if room is None else Figure(room, "there"))
    run = resolve(small.run_config(small_model, tmp_path / "data.jsonl", tmp_path / "out", "experts"), "cuda")
    found = after_out_of_memory.remedies(run, find_gpu("l40s"), 2**16)
    on_host = [key for one in found for key, value in one.settings.items() if is_setting_of_host(key, value)]
    assert found
    assert bool(on_host) == is_named, found
