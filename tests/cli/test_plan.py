"""The commands `plan` and `compare`, and `predict` of a model, as a user runs them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.config.load import load_run_config

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = CONFIGS / "tiny-router.yaml"

Run = Callable[..., Any]


@pytest.mark.slow
def test_a_plan_as_run_files(moetune: Run, small_model: Path, tmp_path: Path) -> None:
    options = ("--gpu", "24GiB", "--goal", "router", "--min-sequence", "64")
    drawn = ("--tokens", "100000", "--html", tmp_path / "plan.html", "--figure", tmp_path / "plan.png")
    ended = moetune("plan", small_model, *options, "--write", tmp_path / "plans", *drawn, "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert (found["schema"], found["fits"], found["nearest_miss"]) == (1, True, None)
    (best,) = found["candidates"]
    assert {"run", "peak_process", "fits", "tokens_per_second_estimate", "gives_up", "beyond"} <= best.keys()
    assert best["fits"] is True
    assert best["method"] == "trace"
    assert found["tokens"] == 100_000
    train = best["run"]["train"]
    step = train["micro_batch"] * train["accumulate"] * train["sequence_length"]
    assert (train["steps"] - 1) * step < 100_000 <= train["steps"] * step
    assert all(f"{file} written" in ended.err and file.stat().st_size for file in (drawn[3], drawn[5]))
    (file,) = found["files"]
    assert load_run_config(file).model_dump(include={"model", "adapt", "train", "optimizer"}) == load_run_config(
        _written(tmp_path, best["run"])
    ).model_dump(include={"model", "adapt", "train", "optimizer"})
    assert f"#     moetune train {file}" in Path(file).read_text()
    again = moetune("plan", small_model, *options, "--write", tmp_path / "plans")
    assert again.code == 2
    assert "exists; choose another folder" in again.err


def _written(folder: Path, run: dict[str, Any]) -> Path:
    (folder / "again.yaml").write_text(yaml.safe_dump(run))
    return folder / "again.yaml"


@pytest.mark.slow
def test_nothing_fits(moetune: Run, small_model: Path) -> None:
    ended = moetune("plan", small_model, "--gpu", "100MiB", "--goal", "router", "--min-sequence", "64", "--json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert (found["fits"], found["candidates"]) == (False, [])
    miss = found["nearest_miss"]
    assert miss["headroom_bytes"] < 0
    assert miss["combination"] is None  # the context alone is larger than the card
    assert len(miss["cards"]) == 2


@pytest.mark.slow
def test_compare(moetune: Run, small_model: Path) -> None:
    shrunk = ("--set", f"model.path={small_model}", "--set", "train.sequence_length=64")
    ended = moetune("compare", TINY, TINY, *shrunk, "--gpu", "24GiB", "--gpu", "100MiB", "--json")
    assert ended.code == 1
    rows = json.loads(ended.out)["runs"]
    assert [(row["name"], row["verdict"]) for row in rows] == [("tiny-router", v) for v in ("yes", "yes", "no", "no")]
    assert all(row["left_out_by_active_parameters"] > 0 for row in rows)
    printed = moetune("compare", TINY, *shrunk, "--gpu", "24GiB").out
    assert "tiny-router" in printed
    assert "leaves out frozen experts" in printed


def test_a_recipe_with_settings(moetune: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    ended = moetune("init", "tiny-lora", "--out", file, "--set", "train.steps=7", "--set", "optimizer.lr=0.001")
    assert ended.code == 0
    config = load_run_config(file)
    recipe = load_run_config(CONFIGS / "tiny-lora.yaml", ["train.steps=7", "optimizer.lr=0.001"])
    assert config == recipe
    assert file.read_text().startswith("# LoRA on attention")
    assert f"#     moetune train {file}" in file.read_text()
