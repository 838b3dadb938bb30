"""`moetune export` as a user meets it: what it prints, what it refuses, what it leaves alone."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from moetune.errors import UserError
from tests import small


@pytest.fixture(scope="module")
def trained(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained two steps for real: routers, experts and LoRA on a base in float32."""
    from moetune.config.schema import RunConfig
    from tests.resolved import train

    folder = tmp_path_factory.mktemp("runs") / "run"
    adapt = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"], "ids": [1]}}
    run = small.run_file(
        small_model, small_data, folder, "experts", adapt=adapt, model={"base": "fp32"}, train={"steps": 2}
    )
    train(RunConfig.model_validate(run), device="cpu")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_trained_run_is_merged_and_checked(run: Path, small_model: Path, moetune: Callable[..., Any]) -> None:
    out = run.parent / "merged"
    ended = moetune("export", run, "--format", "merged", "--out", out, "--check", "2")
    assert ended.code == 0
    first, second = ended.out.splitlines()
    assert re.fullmatch(rf"merged of step 2: \d+ tensors, [\d,]+ bytes, in {out}", first)
    found = re.fullmatch(r"loss on 2 records of training data, \d+ tokens: (\S+) trained, (\S+) exported", second)
    assert found
    assert abs(float(found[1]) - float(found[2])) < 2e-4
    assert (out / "tokenizer.json").read_bytes() == (small_model / "tokenizer.json").read_bytes()


@pytest.mark.full
def test_a_rounded_checkpoint_says_what_survives(
    small_model: Path, small_data: Path, tmp_path: Path, moetune: Callable[..., Any]
) -> None:
    """Layer by layer, and what the loss on held-out data becomes."""
    from tests.resolved import train

    run, held_out = tmp_path / "run", Path(shutil.copy(small_data, tmp_path / "held_out.jsonl"))
    more: Any = {"model": {"base": "fp32"}, "train": {"steps": 1}, "data": {"eval": str(held_out)}}
    train(small.run_config(small_model, small_data, run, "lora", **more), device="cpu")
    out = run.parent / "rounded"
    ended = moetune("export", run, "--format", "merged", "--out", out, "--into", "nvfp4")
    assert ended.code == 0, ended.err
    _, formula, first, second, every, loss = ended.out.splitlines()
    assert "⟨Q(W + Δ) − Q(W), Δ⟩ / ⟨Δ, Δ⟩" in formula
    for line, name in ((first, "layer 0"), (second, "layer 1"), (every, "all")):
        assert re.fullmatch(rf"  {name} +kept +\d\.\d\d   error +\d+\.\d\d", line)
    assert re.fullmatch(r"loss on 14 records of held-out data, \d+ tokens: \S+ trained, \S+ exported", loss)
    said = moetune("export", run, "--format", "merged", "--out", out, "--into", "nvfp4", "--overwrite", "--json").out
    answer = json.loads(said)
    assert answer["into"] == "nvfp4"
    assert [one["layer"] for one in answer["survival"]] == [0, 1, None]
    assert answer["check"]["exported_loss"] > 0
    held_out.unlink()
    ended = moetune("export", run, "--format", "merged", "--out", out, "--into", "nvfp4", "--overwrite", "--json")
    assert (ended.code, json.loads(ended.out)["check"]) == (0, None)
    assert f"note: losses are not compared: no such file: {str(held_out)!r}" in ended.err
    ended = moetune("export", run, "--format", "peft", "--out", out, "--into", "fp8")
    refused(ended, "--into fp8 is for --format merged, and prints losses without --check")


def test_a_delta_for_people_and_for_programs(run: Path, moetune: Callable[..., Any]) -> None:
    out = run / "delta"
    ended = moetune("export", run, "--format", "delta", "--out", out)
    assert (ended.code, ended.err) == (
        0,
        "note: LoRA factors are not in the delta; --format peft or merged has them\n",
    )
    tensors = load_file(out / "delta.safetensors")
    assert len(tensors) == 1 + 2 * 2 * 3  # a router; two experts of two layers, three matrices each
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert ended.out == f"delta of step 2: 13 tensors, {size:,} bytes, in {out}\n"

    ended = moetune("export", run, "--format", "delta", "--out", out, "--overwrite", "--json")
    result = json.loads(ended.out)
    assert {key: result[key] for key in ("schema", "format", "out", "step", "tensors", "bytes", "check")} == {
        "schema": 1, "format": "delta", "out": str(out), "step": 2, "tensors": 13, "bytes": size, "check": None,
    }  # fmt: skip
    assert len(result["notes"]) == 1


def refused(ended: Any, message: str) -> None:
    """Exit code 2, nothing on stdout, and one line that says it."""
    assert ended.code == 2
    assert ended.out == ""
    assert re.fullmatch(rf"error: {message}\n", ended.err), ended.err


def test_a_folder_that_is_no_run(tmp_path: Path, moetune: Callable[..., Any]) -> None:
    rest = ("--format", "delta", "--out", tmp_path / "out")
    refused(moetune("export", tmp_path / "none", *rest), r"run folder '.*none' does not exist\.")
    refused(moetune("export", tmp_path, *rest), r"'.*' is not a run folder: no run\.yaml in it")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.yaml").touch()
    refused(moetune("export", tmp_path / "run.yaml", *rest), r"'.*run\.yaml' is a file; give the folder of a run, .*")


def test_options_that_do_not_go_together(run: Path, moetune: Callable[..., Any]) -> None:
    ended = moetune("export", run, "--format", "delta", "--out", run.parent / "out", "--check", "1")
    refused(ended, "--check computes with stock transformers .* do not read --format delta; .* merged or peft")
    ended = moetune("export", run, "--format", "gguf", "--out", run.parent / "out")
    refused(ended, "--format 'gguf': give delta, peft, merged, vllm or sglang")


def test_a_check_that_fails_leaves_the_export(
    run: Path, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise UserError("no memory")

    monkeypatch.setattr("moetune.inference.check.check_export", fail)
    out = run.parent / "merged"
    ended = moetune("export", run, "--format", "merged", "--out", out, "--check", "1")
    assert (ended.code, ended.out) == (2, "")
    assert f"error: '{out}' was written; --check failed: no memory\n" in ended.err
    assert (out / "config.json").is_file()
