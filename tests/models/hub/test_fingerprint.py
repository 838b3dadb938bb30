"""Which checkpoint exactly: any changed byte, name, shape or dtype is another one, and the difference is named."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moetune.errors import UserError
from moetune.json_files import parse_json
from moetune.models.hub import fingerprint
from moetune.models.hub.fingerprint import Base, Fingerprint, digesting, headers, take_fingerprint, taking_fingerprint


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors or {"a": torch.zeros(2, 3), "b": torch.ones(4)}, folder / "model.safetensors")
    return folder


def test_the_same_checkpoint_elsewhere_is_the_same(tmp_path: Path) -> None:
    one, two = take_fingerprint(write(tmp_path / "one")), take_fingerprint(write(tmp_path / "two"))
    assert one == two
    assert one.difference(two) is None
    assert one.tensors == {"a": "F32 [2, 3]", "b": "F32 [4]"} == headers(tmp_path / "one")


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"a": torch.zeros(3, 2), "b": torch.ones(4)}, "a is F32 [3, 2], not F32 [2, 3]"),
        ({"a": torch.zeros(2, 3), "b": torch.ones(4).half()}, "b is F16 [4], not F32 [4]"),
        ({"a": torch.zeros(2, 3)}, "b is no such tensor, not F32 [4]"),
        ({"a": torch.zeros(2, 3), "b": -torch.ones(4)}, "the same tensors with other values (model.safetensors)"),
    ],
)
def test_a_difference_is_named(changed: dict[str, torch.Tensor], difference: str, tmp_path: Path) -> None:
    one = take_fingerprint(write(tmp_path / "one"))
    assert one.difference(take_fingerprint(write(tmp_path / "two", **changed))) == difference


def test_it_comes_back_from_json_whole_or_not_at_all(tmp_path: Path) -> None:
    base = Base("one", take_fingerprint(write(tmp_path / "one")))
    raw = base.to_json()
    assert parse_json(json.dumps(raw).encode(), Base, "it") == base
    raw["fingerprint"]["files"]["model.safetensors"] = "0" * 64
    for broken in (raw, raw | {"fingerprint": None}, {"name": "one"}, [], None):
        with pytest.raises(UserError):
            parse_json(json.dumps(broken).encode(), Base, "it")


def test_it_is_taken_while_something_else_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, main = write(tmp_path / "one"), threading.get_ident()
    threads: list[int] = []
    digest = fingerprint.digest
    monkeypatch.setattr(
        fingerprint, "digest", lambda *a, **k: (threads.append(threading.get_ident()), digest(*a, **k))[1]
    )
    with taking_fingerprint(folder) as taken:
        assert taken() == taken()
    with digesting([folder / "model.safetensors"], 2) as digests:
        assert digests() == taken().files
    assert len(threads) == 2
    assert main not in threads
    assert taken() == take_fingerprint(folder)


def test_a_body_that_fails_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread stops after the block that it is at."""
    folder = write(tmp_path / "one", a=torch.zeros(1000))
    monkeypatch.setattr(fingerprint, "_BLOCK", 1)
    read: list[int] = []
    stop_if = fingerprint._stop_if

    def counts(left: threading.Event) -> None:
        read.append(1)
        left.wait(10)
        stop_if(left)

    monkeypatch.setattr(fingerprint, "_stop_if", counts)
    with pytest.raises(KeyError), taking_fingerprint(folder):
        raise KeyError
    assert len(read) <= 1


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only safetensors checkpoints are read"), taking_fingerprint(tmp_path):
        pass
    assert isinstance(take_fingerprint(write(tmp_path / "one")), Fingerprint)
