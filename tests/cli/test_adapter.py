"""`moetune adapter` as a user meets it: answers, exit codes, JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetune.adapters.base import AdapterBase, base_of
from moetune.config.schema import ModelConfig
from moetune.models.source import find_model_source
from moetune.run.resolve import resolve_model
from tests.adapters.made import make_adapter, write
from tests.adapters.test_check import slowest


@pytest.fixture(scope="module")
def base(small_model: Path) -> AdapterBase:
    model = resolve_model(ModelConfig.model_validate({"path": str(small_model)}), "cpu")
    return base_of(find_model_source(str(small_model)), model.plain, model.structure, str(small_model))


def test_a_sound_adapter_and_a_program_that_would_not_read_it(
    base: AdapterBase, tmp_path: Path, moetune: Callable[..., Any]
) -> None:
    write(tmp_path / "adapter", make_adapter(base), base, "peft")
    said = moetune("adapter", "check", base.name, tmp_path / "adapter")
    assert (said.code, said.err) == (0, "")
    assert "yes" in said.out
    assert "gate_up" in said.out
    asked = moetune("adapter", "check", base.name, tmp_path / "adapter", "--for", "vllm", "--json")
    report = json.loads(asked.out)
    assert asked.code == 1
    assert report["schema"] == 1
    assert report["layout"] == "peft"
    assert report["programs"]["peft"] is None
    assert len(report["problems"]) == 1
    assert {one["experts"] and len(one["experts"]) for one in report["covered"]} == {None, 4}


def test_convert_merge_and_diff(base: AdapterBase, tmp_path: Path, moetune: Callable[..., Any]) -> None:
    write(tmp_path / "adapter", make_adapter(base), base, "peft")
    said = moetune("adapter", "convert", base.name, tmp_path / "adapter", "--to", "vllm", "--out", tmp_path / "vllm")
    assert said.code == 0
    assert "read as PEFT's" in said.err
    converted = moetune(
        "adapter", "convert", base.name, tmp_path / "vllm", "--to", "peft", "--out", tmp_path / "back", "--json"
    )
    assert json.loads(converted.out)["layout"] == "per-expert"
    same = moetune("adapter", "diff", tmp_path / "adapter", tmp_path / "back", "--base", base.name)
    assert (same.code, "the same" in same.out) == (0, True)
    write(tmp_path / "spoiled", make_adapter(base, grow=True), base, "peft", lambda _, own: own.update(lora_alpha=3))
    other = moetune("adapter", "diff", tmp_path / "vllm", tmp_path / "spoiled", "--json")
    found = json.loads(other.out)
    assert (other.code, found["schema"], found["equal"]) == (1, 1, False)
    assert {one["because"] for one in found["differing"] if "q_proj" in one["name"]} == {
        "the scale: A's is 2.5 times B's"
    }
    merged = moetune("adapter", "merge", base.name, tmp_path / "vllm", "--out", tmp_path / "merged", "--json")
    assert json.loads(merged.out)["tensors"] == len(base.layers) * (4 + 4 * 3)
    assert (tmp_path / "merged" / "config.json").is_file()
    again = moetune("adapter", "merge", base.name, tmp_path / "vllm", "--out", tmp_path / "merged")
    assert again.code == 2


def test_bad_input_ends_with_one_message(base: AdapterBase, tmp_path: Path, moetune: Callable[..., Any]) -> None:
    write(tmp_path / "adapter", make_adapter(base, ids=(2,)), base, "peft", slowest)
    asked = moetune("adapter", "check", base.name, tmp_path / "adapter")
    assert (asked.code, "looks like unsloth-grouped" in " ".join(asked.out.split())) == (1, True)
    for command, remedy in {
        ("convert", base.name, tmp_path / "adapter", "--to", "vllm", "--out", tmp_path / "out"): "--from",
        ("convert", base.name, tmp_path / "adapter", "--to", "vlm", "--out", tmp_path / "out"): "vllm",
        ("check", base.name, tmp_path / "nothing"): "does not exist",
        ("check", base.name, tmp_path / "adapter", "--from", "megatron"): "shapes",
        ("diff", tmp_path / "adapter", tmp_path / "adapter"): "--base",
    }.items():
        said = moetune("adapter", *command)
        assert said.code == 2
        assert said.err.startswith("error: ")
        assert remedy in said.err
        assert not (tmp_path / "out").exists()
