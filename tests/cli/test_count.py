"""The commands `count` and `models`, as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Moetune = Callable[..., Any]

RUN_FILE = """
model: {path: tiny-mixtral}
adapt: {router: all, lora: {rank: 4, alpha: 8, targets: [attention]}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    return tmp_path / "run.yaml"


def test_count_table(moetune: Moetune) -> None:
    out = moetune("count", "qwen1.5-moe-a2.7b").out
    for text in ("14,315,784,192", "shared_experts", "24 of 24 layers", "60 a layer, 4 of them", "8,650,752"):
        assert text in out


def test_count_table_of_a_dense_model(moetune: Moetune) -> None:
    out = moetune("count", "llama-7b").out
    assert "6,738,415,616" in out
    assert "none with experts" in out


def test_a_name_is_printed_without_its_control_characters(
    moetune: Moetune, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a\x1b[31m").symlink_to(small_model)
    ended = moetune("count", "./a\x1b[31m")
    assert ended.code == 2
    assert "'./a\\x1b[31m': it holds a character that cannot be printed" in ended.err
    assert "\x1b" not in ended.err


def test_count_with_a_run_file_also_says_what_trains(moetune: Moetune, run: Path) -> None:
    trainable = json.loads(moetune("count", "--run", run, "--json").out)["trainable"]
    assert trainable["router"] == 4096
    assert trainable["lora"] > 0
    assert trainable["total"] == sum(trainable[part] for part in ("router", "experts", "lora", "other"))
    assert (
        json.loads(moetune("count", "--run", run, "--set", "adapt.lora.rank=8", "--json").out)["trainable"]["lora"]
        == 2 * trainable["lora"]
    )
    assert f"{trainable['total']:,}" in moetune("count", "--run", run).out


def test_model_given_beside_a_run_file_replaces_its_model(moetune: Moetune, run: Path) -> None:
    result = json.loads(moetune("count", "mixtral-8x7b", "--run", run, "--json").out)
    assert result["total"] == 46_702_792_704
    assert result["trainable"]["router"] == 1_048_576


def test_models_lists_the_catalog(moetune: Moetune) -> None:
    result = json.loads(moetune("models", "--json").out)
    assert result["schema"] == 1
    totals = {model["name"]: model["published_total"] for model in result["models"]}
    assert totals["mixtral-8x7b"] == 46_702_792_704
    assert [model["name"] for model in result["models"] if model["embedded_weights"]] == ["tiny-mixtral"]
    out = moetune("models").out
    assert "granite-3.1-3b-a800m" in out
    assert "671,026,419,200" in out


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_hub_ids_can_be_copied(columns: int, moetune: Moetune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    models = json.loads(moetune("models", "--json").out)["models"]
    names = {name for model in models for name in (model["name"], model["hub_id"]) if name is not None}
    assert len(names) == 2 * len(models) - 1
    assert names - {*moetune("models").out.split()} == set()
