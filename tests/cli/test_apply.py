"""`moetune apply` as a user meets it: a delta and its base become a checkpoint, and nothing else does."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from moetune.exporting.export import export
from moetune.models.hub.fingerprint import take_fingerprint
from tests import small
from tests.cli.test_export import refused
from tests.resolved import train, write_quantized_base

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def made(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the delta and the merged checkpoint of a run."""
    folder = tmp_path_factory.mktemp("made")
    train(small.run_config(small_model, small_data, folder / "run", "experts", model={"base": "fp32"}))
    export(folder / "run", "delta", folder / "delta")
    export(folder / "run", "merged", folder / "merged")
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
    wrong = message.replace("--force other", "--force 'small-mixtral' is not its name; --force other")
    refused(moetune(*command, "--force", "small-mixtral"), wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    ended = moetune(*command, "--force", "other")
    assert ended.code == 0
    assert re.fullmatch(rf"note: applied to another base than it was made for: {reason}\n", ended.err)


def test_a_force_that_was_not_needed_is_noted(made: Path, small_model: Path, tmp_path: Path, moetune: Command) -> None:
    command = ("apply", made / "delta", "--to", small_model, "--overwrite", "--out", tmp_path / "out", "--force")
    ended = moetune(*command, "other")
    note = r"note: --force 'other' is not the name of the base \(small-mixtral\); it was not needed: .*\n"
    assert ended.code == 0
    assert re.fullmatch(note, ended.err)
    assert moetune(*command, "small-mixtral").err == ""


def test_a_base_of_the_catalog(small_data: Path, tmp_path: Path, moetune: Command) -> None:
    train(small.run_config(Path("tiny-mixtral"), small_data, tmp_path / "run", "router", train={"steps": 1}))
    export(tmp_path / "run", "delta", tmp_path / "delta")
    export(tmp_path / "run", "merged", tmp_path / "merged")
    ended = moetune("apply", tmp_path / "delta", "--to", "tiny-mixtral", "--out", tmp_path / "out")
    assert (ended.code, ended.err) == (0, "")
    assert take_fingerprint(tmp_path / "out") == take_fingerprint(tmp_path / "merged")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["base"]["name"] == "tiny-mixtral"


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
    refused(
        moetune("apply", small_model, "--to", small_model, "--out", out),
        r".* is not a delta: its manifest.json cannot be read.*",
    )
    refused(moetune("apply", made / "merged", "--to", small_model, "--out", out), r".* is not a delta: .*")
    message = r"--to 'mixtral-8x7b': its weights are not on this machine; download it first, or give a folder"
    refused(moetune("apply", delta, "--to", "mixtral-8x7b", "--out", out), message)
    refused(moetune("apply", delta, "--to", tmp_path / "no", "--out", out), r"model '.*no': neither a catalog name.*")
    for occupied in (small_model, delta, small_model.parent):
        message = r"--out '.*' holds what is being read; choose another"
        refused(moetune("apply", delta, "--to", small_model, "--out", occupied, "--overwrite"), message)
    write_quantized_base(str(small_model), tmp_path / "packed", "nf4", True)
    message = r"--to '.*packed' is a quantized base; give the checkpoint that it was made from: '.*small-mixtral'"
    refused(moetune("apply", delta, "--to", tmp_path / "packed", "--out", out), message)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    message = r"--out '.*out': [\d,]+ bytes are needed there and 1,000 are free"
    refused(moetune("apply", delta, "--to", small_model, "--out", out), message)
    assert not out.exists()
