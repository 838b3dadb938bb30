"""The commands `predict` and `verify`, as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetune.memory.report import PART_NAMES
from moetune.models.source import find_model_source

CONFIGS = Path(__file__).parents[2] / "configs"
ROUTER = CONFIGS / "mixtral-8x7b-router.yaml"
EXPERTS = CONFIGS / "mixtral-8x7b-experts.yaml"
TINY = CONFIGS / "tiny-router.yaml"
SHORT = ("--set", "train.router_aux_loss=0")
"""Without a loss of all layers together a few of them stand for all."""
MIXED = ("--set", "optimizer.name=adamw", "--set", "optimizer.master_weights=fp32")

Run = Callable[..., Any]


def assert_contract(result: dict[str, Any]) -> None:
    """The keys that scripts may count on, and that the numbers of each rank add up."""
    assert result["schema"] == 1
    assert {
        "model",
        "method",
        "gpu",
        "fits",
        "verdict",
        "headroom_bytes",
        "assumptions",
        "ranks",
        "changes",
    } <= result.keys()
    assert set(result["gpu"]) == {"name", "usable_bytes"}
    assert all(isinstance(assumption, str) for assumption in result["assumptions"])
    for rank in result["ranks"]:
        others = {"rank", "outside_allocator", "host_bytes", "sent_bytes"}
        others |= {f"peak_{kind}" for kind in ("allocated", "reserved", "process")}
        assert set(rank) == others | set(PART_NAMES)
        assert all(isinstance(value, int) for value in rank.values())
        assert sum(rank[name] for name in PART_NAMES) == rank["peak_allocated"] <= rank["peak_reserved"]
        assert rank["peak_process"] == rank["peak_reserved"] + rank["outside_allocator"]
    assert result["fits"] is (result["headroom_bytes"] >= 0) is (result["verdict"] != "no")


def required(result: dict[str, Any]) -> int:
    """Bytes that the card must have."""
    return result["gpu"]["usable_bytes"] - result["headroom_bytes"]


@pytest.fixture
def shallow(tmp_path: Path) -> list[str]:
    """Settings that leave two layers and four experts of a Mixtral, as wide as they are: kinds of runs are recorded in
    a fourth of the time. Its experts train as in the run file, of the first layer."""
    config = find_model_source("mixtral-8x7b").config
    config.num_hidden_layers, config.num_local_experts = 2, 4
    config.save_pretrained(tmp_path / "shallow")
    settings = [f"model.path={tmp_path / 'shallow'}", "adapt.router=0", "train.accumulate=1"]
    return [option for setting in settings for option in ("--set", setting)]


@pytest.mark.slow
def test_a_run_that_fits(moetune: Run) -> None:
    ended = moetune("predict", ROUTER, *SHORT, "--json")
    assert (ended.code, ended.err) == (0, "")
    result = json.loads(ended.out)
    assert_contract(result)
    assert result["method"] == "trace"
    assert result["gpu"]["name"] == "NVIDIA L40S"
    assert result["fits"] is True
    assert len(result["ranks"]) == 1
    assert result["ranks"][0]["trainable_weights"] == 2 * 1_048_576
    assert result["ranks"][0]["frozen_weights"] / 2**30 == pytest.approx(22.80, abs=0.01)
    assert required(result) == result["ranks"][0]["peak_allocated"] + result["ranks"][0]["outside_allocator"]
    assert result["changes"] == []


def test_what_does_not_fit_is_said_with_its_remedy(
    shallow: list[str], moetune: Run, pytestconfig: pytest.Config
) -> None:
    """In JSON and in words; what is said to fit does: the last of it on a push."""
    words = ["predict", EXPERTS, *shallow, "--set", "adapt.experts.layers=0", "--gpu", "4GiB"]
    ended = moetune(*words, *MIXED, "--json")
    assert ended.code == 1
    result = json.loads(ended.out)
    assert_contract(result)
    assert result["method"] == "trace"
    assert result["fits"] is False
    fitting = {change["settings"][0]: change for change in result["changes"] if change["fits"]}
    assert {"optimizer.name=adamw8bit", "optimizer.name=sgd"} <= fitting.keys()

    table = moetune(*words, *MIXED).out
    assert table.startswith("does NOT fit")
    for text in ("frozen weights", "master weights", "--set optimizer.name=adamw8bit", "4GiB"):
        assert text in table
    for change in [*fitting.values()][0 if pytestconfig.getoption("--all") else -1 :]:
        settings = [option for setting in change["settings"] for option in ("--set", setting)]
        least = ("--set", "train.expert_memory=256MiB")  # `auto` takes what is left of the card
        changed = moetune(*words, *settings, *least, "--json")
        assert changed.code == 0, settings
        assert required(json.loads(changed.out)) == change["peak_process"]


def test_page_and_figure_are_written(moetune: Run, tmp_path: Path) -> None:
    page, figure = tmp_path / "report.html", tmp_path / "report.svg"
    options = ["--gpu", "24GiB", "--tokens", "1000", "--html", page, "--figure", figure]
    ended = moetune("predict", TINY, *options, "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert_contract(found)
    assert found["hours"] is None
    html = page.read_text(encoding="utf-8")
    assert "<html" in html
    assert "tiny-mixtral" in html
    assert "<svg" in figure.read_text(encoding="utf-8")


def test_how_long(moetune: Run, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "tokens_per_second": 1}\n{"step": 1, "eval_loss": 1}\n{"step": 2, "tokens_per_second": 500.0}\n'
    )
    ended = moetune("predict", TINY, "--measured", tmp_path / "metrics.jsonl", "--gpu", "24GiB")
    assert (ended.code, "--gpu l40s" in ended.err) == (2, True)
    options = ("--set", "train.sequence_length=64", "--gpu", "l40s", "--tokens", "1800000", "--measured", tmp_path)
    found = json.loads(moetune("predict", TINY, *options, "--json").out)
    time = found["time"]
    assert time["measured_tokens_per_second"] == 500
    assert time["tokens_per_second"] == {"fast": 500, "slow": 500}
    assert found["hours"] == {"fast": 1, "slow": 1}
    assert time["flops_per_step"] == sum(part["flops"] + part["flops32"] for part in time["work"].values()) > 0
    assert time["parts"].keys() >= time["work"].keys() >= {"experts", "attention", "router", "optimizer"}


@pytest.mark.full
def test_verify_shows_what_is_on_the_host(moetune: Run) -> None:
    sections = ("--set", "train.sequence_length=64", "--set", "model.experts_on=host")
    result = json.loads(moetune("verify", TINY, *sections, "--json", "--steps", "2").out)
    keys = {"peak_allocated", "peak_reserved", "peak_process", "host_bytes"}
    assert set(result["predicted"]) == set(result["measured"]) == keys
    assert (result["schema"], result["holds"], result["tokens_per_second"] > 0) == (1, True, True)
    assert result["predicted"]["host_bytes"] == result["measured"]["host_bytes"] > 1_000_000
