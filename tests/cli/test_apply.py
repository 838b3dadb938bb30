"""`moetune apply` as a user meets it: a delta and its base become a checkpoint, and nothing else does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from moetune.adapt.build import write_packed_base
from moetune.export.export import export_run
from moetune.hub.fingerprint import take_fingerprint
from moetune.train.run import train
from tests import small
from tests.cli.test_export import refused

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def made(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the delta and the merged checkpoint of a run."""
    folder = tmp_path_factory.mktemp("made")
    train(small.run_config(small_model, small_data, folder / "run", "experts", model={"base": "fp32"}))
    export_run(folder / "run", "delta", folder / "delta")
    export_run(folder / "run", "merged", folder / "merged")
    return folder


def test_it_is_the_merged_checkpoint(made: Path, small_model: Path, tmp_path: Path, moetune: Command) -> None:
    out = tmp_path / "out"
    ended = moetune("apply", made / "delta", "--to", small_model, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    assert re.fullmatch(rf"applied 13 tensors, [\d,]+ bytes, in {out}\n", ended.out)
    assert take_fingerprint(out) == take_fingerprint(made / "merged")
    assert (out / "tokenizer.json").read_bytes() == (small_model / "tokenizer.json").read_bytes()
    AutoModelForCausalLM.from_pretrained(out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["forced"]) == ("applied", 3, None)

    refused(moetune("apply", made / "delta", "--to", small_model, "--out", out), r"--out '.*out' is not empty; .*")
    ended = moetune("apply", made / "delta", "--to", small_model, "--out", out, "--overwrite", "--json")
    result = json.loads(ended.out)
    assert (result["schema"], result["out"], result["tensors"], result["forced"]) == (1, str(out), 13, None)


def test_another_base_needs_its_name(made: Path, tmp_path: Path, moetune: Command) -> None:
    other = small.write_model(tmp_path / "other", initializer_range=0.03)
    command = ("apply", made / "delta", "--to", other, "--out", tmp_path / "deep" / "out")
    reason = r"the same tensors with other values \(model\.safetensors\)"
    message = rf"the delta in '.*' was made for another base than '.*other': {reason}; --force other applies it .*"
    refused(moetune(*command), message)
    refused(moetune(*command, "--force", "small-mixtral"), message)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    ended = moetune(*command, "--force", "other")
    assert ended.code == 0
    assert re.fullmatch(rf"note: applied to another base than it was made for: {reason}\n", ended.err)


@pytest.mark.parametrize("file", ["delta.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_delta(
    file: str, damage: str, made: Path, small_model: Path, tmp_path: Path, moetune: Command
) -> None:
    delta = Path(shutil.copytree(made / "delta", tmp_path / "delta"))
    data = bytearray((delta / file).read_bytes())
    if damage == "flip":
        data[-9 if file.startswith("delta") else data.index(b'"content": "') + 15] ^= 1
        (delta / file).write_bytes(data)
    elif damage == "cut":
        (delta / file).write_bytes(data[:-3])
    else:
        (delta / file).unlink()
    ended = moetune("apply", delta, "--to", small_model, "--out", tmp_path / "out")
    refused(ended, rf".*{file}.*")
    assert not (tmp_path / "out").exists()


def test_folders_that_will_not_do(
    made: Path, small_model: Path, tmp_path: Path, moetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta, out = made / "delta", tmp_path / "out"
    refused(moetune("apply", tmp_path / "no", "--to", small_model, "--out", out), r"delta '.*no' does not exist")
    refused(moetune("apply", small_model, "--to", small_model, "--out", out), r".* is not a delta: no valid manifest.*")
    refused(moetune("apply", made / "merged", "--to", small_model, "--out", out), r".* is not a delta: .*")
    refused(moetune("apply", delta, "--to", "mixtral-8x7b", "--out", out), r"--to 'mixtral-8x7b' is no folder; .*")
    for occupied in (small_model, delta, small_model.parent):
        message = r"--out '.*' holds what is being read; choose another"
        refused(moetune("apply", delta, "--to", small_model, "--out", occupied, "--overwrite"), message)
    write_packed_base(str(small_model), tmp_path / "packed", "nf4", True)
    message = r"--to '.*packed' is a packed base; give the checkpoint that was packed: '.*small-mixtral'"
    refused(moetune("apply", delta, "--to", tmp_path / "packed", "--out", out), message)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    message = r"--out '.*out': [\d,]+ bytes are needed there and 1,000 are free"
    refused(moetune("apply", delta, "--to", small_model, "--out", out), message)
    assert not out.exists()
