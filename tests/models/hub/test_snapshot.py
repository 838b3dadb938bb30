"""A model on the hub: asked for once, and what is downloaded is said before; the hub here is made up."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moetune.errors import UserError
from moetune.models.hub import reach, snapshot
from moetune.models.source import find_model_source
from moetune.training.data.load import tokenizer_of
from moetune.training.data.sources import open_sources


class File(NamedTuple):
    file_size: int
    will_download: bool


def online(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """Every module asks whether the hub can be reached, and no client gets to try again and again."""
    for module in ("models.source", "training.data.load", "training.data.sources", "models.hub.snapshot"):
        monkeypatch.setattr(f"moetune.{module}.hub_is_reachable", lambda: answers)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("asked the hub"))


def test_what_is_downloaded_is_said_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []

    def snapshot_download(hub_id: str, *, dry_run: bool = False, allow_patterns: list[str], **_: Any) -> Any:
        assert "*.safetensors" in allow_patterns
        said.append(capsys.readouterr().err)
        return [File(4_990_000_000, True), File(12_000, True), File(7, False)] if dry_run else str(tmp_path)

    online(monkeypatch, True)
    monkeypatch.setattr(snapshot, "snapshot_download", snapshot_download)
    assert snapshot.download("org/model") == tmp_path
    assert said == ["", "downloading org/model: 4.99 GB in 2 files\n"]


def test_offline_weights_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, False)
    with pytest.raises(
        UserError, match="'org/model' cannot be downloaded from the hub: the hub cannot be reached"
    ) as raised:
        snapshot.download("org/model")
    assert "hf download org/model elsewhere, and give the folder" in str(raised.value)


def test_offline_what_is_here_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    online(monkeypatch, False)
    monkeypatch.setattr(snapshot, "downloaded", lambda hub_id: tmp_path)
    monkeypatch.setattr(snapshot, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert snapshot.download("org/model") == tmp_path


def test_offline_nothing_else_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, False)
    with pytest.raises(UserError, match=reach.UNREACHABLE):
        find_model_source("org/model")
    with pytest.raises(UserError, match="the tokenizer of 'org/model'"):
        tokenizer_of("org/model", "org/model")
    with pytest.raises(UserError, match="'org/model' cannot be loaded"):
        open_sources("org/model")
