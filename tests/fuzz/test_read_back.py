"""Every JSON or YAML file that is read back × every kind of value at every key × every command that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.config import RunConfig
from tests import small
from tests.fuzz.damage import places, within
from tests.resolved import train, write_packed_base
from tests.scoring.made import write_scores

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**400, 0.5, float("nan"), float("inf"), "", "a\x1b[31m",
    [], [[]], {}, {"": ""}, {"a": {"b": {}}},
)  # fmt: skip
DEEP = "[" * 3000

TABLE: dict[str, tuple[str, ...]] = {
    "run/metrics.jsonl": ("report run --no-timeline", "predict run/run.yaml --gpu l40s --measured run --tokens 9"),
    "run/memory.json": (
        "report run --no-timeline",
        "predict run/run.yaml --method formula --routing run/memory.json",
    ),
    "run/drift.json": ("report run --no-timeline",),
    "run/run.yaml": ("report run --no-timeline", "train run/run.yaml --resume auto --dry-run"),
    "run/base.json": ("train run/run.yaml --resume auto --dry-run",),
    "run/inputs.json": ("train run/run.yaml --resume auto --dry-run",),
    "run/checkpoints/step-2/manifest.json": ("train run/run.yaml --resume auto --dry-run",),
    "packed/packed.json": ("count packed",),
    "scores.json": ("select scores.json --k 1",),
}
"""What is read back -> the commands that read it. A new file belongs here."""


@pytest.fixture(scope="module")
def written(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read_back")
    settings = {"steps": 2, "save_every": 2}
    train(RunConfig.model_validate(small.run_file(small_model, small_data, folder / "run", "lora", train=settings)))
    layer = {"before": [1, 2], "after": [2, 1], "distance": 0.1, "changed": 0.5, "died": [], "came": []}
    drift = {"schema": 1, "run": "run", "step": 2, "data": "x", "tokens": 3, "changed": 0.5, "layers": {"0": layer}}
    (folder / "run" / "drift.json").write_text(json.dumps(drift))
    write_packed_base(str(small_model), folder / "packed", "nf4", double_quant=True)
    write_scores(folder / "scores.json", {0: [4, 3, 2, 1], 1: [1, 2, 3, 4]}, str(small_model))
    return folder


def damaged_texts(name: str, text: str) -> list[str]:
    """The file with each value at each key; of lines the first one."""
    first, *rest = text.splitlines(keepends=True) if name.endswith(".jsonl") else [text]
    tree = yaml.safe_load(first) if name.endswith(".yaml") else json.loads(first)
    found = [DEEP, "", "null", "3", "[]", "\ufeff{}"]
    for node, key in places(tree):
        before = node[key]
        for value in VALUES:
            node[key] = value
            found.append((yaml.safe_dump(tree) if name.endswith(".yaml") else json.dumps(tree)) + "\n" + "".join(rest))
        node[key] = before
    return found


def check(name: str, written: Path, moetune: Callable[..., Any], every: int) -> None:
    file = written / name
    whole = file.read_bytes()
    try:
        for command in TABLE[name]:
            said = moetune(*command.split())
            assert said.code in (0, 1), said.err
            for number, text in list(enumerate(damaged_texts(name, whole.decode())))[::every]:
                file.write_text(text, encoding="utf-8", errors="surrogatepass")
                with within(60):
                    said = moetune(*command.split())
                assert said.code in (0, 1, 2), (number, text[:500], said.err)
                assert "Traceback" not in said.err, (number, text[:500], said.err)
                assert said.code != 2 or "error: " in said.err
                assert "\x1b[31m" not in said.out + said.err
    finally:
        file.write_bytes(whole)


@pytest.mark.full
@pytest.mark.parametrize("name", TABLE)
def test_every_value_at_every_key(
    name: str, written: Path, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written)
    check(name, written, moetune, 1)


@pytest.mark.parametrize(
    "name", [name for name in TABLE if name.endswith(("metrics.jsonl", "drift.json", "scores.json"))]
)
def test_some_values(name: str, written: Path, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written)
    check(name, written, moetune, 197)
