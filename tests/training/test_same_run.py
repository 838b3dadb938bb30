"""A run that goes on is given what it began with: data, configuration, tokenizer, and its own checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.finished_run import open_run
from moetune.json_files import sealed
from moetune.training.folder.manifest import write_manifest
from moetune.training.folder.run_folder import RunFolder
from tests import small
from tests.resolved import train

Begun = dict[str, Any]


@pytest.fixture(scope="module")
def begun(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(small_model, folder / "model")
    for name in ("train", "eval"):
        small.write_data(folder / f"{name}.jsonl", small.DATA if name == "train" else small.DATA[:3])
    (folder / "model" / "generation_config.json").write_text("{}")
    return begin(folder)


def run_of(folder: Path, steps: int) -> RunConfig:
    data = {"eval": str(folder / "eval.jsonl")}
    train_ = {"steps": steps, "save_every": 1}
    return small.run_config(folder / "model", folder / "train.jsonl", folder / "run", data=data, train=train_)


def begin(folder: Path) -> Begun:
    train(run_of(folder, 2))
    return {"folder": folder}


@pytest.fixture
def folder(begun: Begun, tmp_path: Path) -> Path:
    """The run with its data and its base, elsewhere: the run file says where."""
    copy = Path(shutil.copytree(begun["folder"], tmp_path / "copy"))
    for file in copy.rglob("run.yaml"):
        file.write_text(file.read_text().replace(str(begun["folder"]), str(copy)))
    for checkpoint in RunFolder(copy / "run").checkpoints():
        write_manifest(checkpoint, int(checkpoint.name[5:]))
    return copy


def resumed(folder: Path, resume: str) -> None:
    train(run_of(folder, 3), resume="auto" if resume == "auto" else str(folder / "run" / "checkpoints" / "step-2"))


BOTH = pytest.mark.parametrize("resume", ["auto", "PATH"])


@BOTH
def test_what_is_as_it_was(resume: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed(folder, resume)
    assert "has changed" not in capsys.readouterr().err


@BOTH
def test_data_edited_in_place(resume: str, folder: Path) -> None:
    """Even where the number of tokens stays."""
    file = folder / "train.jsonl"
    file.write_text(file.read_text().replace("router", "retour"))
    with pytest.raises(UserError, match=r"data\.train has changed since it began: its tokens differ"):
        resumed(folder, resume)


@BOTH
def test_held_out_data_edited(resume: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_data(folder / "eval.jsonl", small.DATA[3:6])
    resumed(folder, resume)
    assert "data.eval has changed since the run began: held-out losses before and after" in capsys.readouterr().err


@BOTH
def test_configuration_edited(resume: str, folder: Path) -> None:
    file = folder / "model" / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"transformers_version": "9"}))
    train(run_of(folder, 2), resume="auto")
    file.write_text(json.dumps(said | {"rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match=r"config\.json of the base: rms_norm_eps is 0\.5, and was"):
        resumed(folder, resume)


@BOTH
def test_files_beside_the_weights(resume: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Harmless as long as the data's tokens are the same; else they are named as a reason."""
    (folder / "model" / "generation_config.json").write_text('{"do_sample": true}')
    resumed(folder, resume)
    assert "generation_config.json beside the base's weights has changed" in capsys.readouterr().err
    tokenizer = json.loads((folder / "model" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"what makes tokens of it: .*tokenizer\.json"):
        train(run_of(folder, 4), resume="auto")


@BOTH
def test_another_run_file(resume: str, folder: Path) -> None:
    """`PATH` compares it as `auto` does: with the folder's, and that one with the checkpoint's."""
    file = folder / "run" / "run.yaml"
    whole = file.read_text()
    file.write_text(whole.replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match=r"run\.yaml' was changed after step-2 was written:\n  train\.seed"):
        resumed(folder, resume)


@BOTH
def test_a_checkpoint_of_another_run(resume: str, folder: Path, tmp_path: Path) -> None:
    """Of the same run file, even."""
    shutil.rmtree(folder / "run" / "checkpoints" / "step-2")
    kept = shutil.copytree(folder, tmp_path / "first")
    shutil.rmtree(folder / "run")
    train(run_of(folder, 2))
    shutil.rmtree(folder / "run" / "checkpoints" / "step-1")
    shutil.copytree(Path(kept) / "run" / "checkpoints" / "step-1", folder / "run" / "checkpoints" / "step-1")
    checkpoint = folder / "run" / "checkpoints" / "step-1"
    shutil.rmtree(folder / "run" / "checkpoints" / "step-2")
    with pytest.raises(UserError, match="is of another run than"):
        train(run_of(folder, 3), resume="auto" if resume == "auto" else str(checkpoint))


@BOTH
def test_a_checkpoint_by_another_name(resume: str, folder: Path) -> None:
    checkpoints = folder / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-1")
    (checkpoints / "step-2").rename(checkpoints / "step-1")
    with pytest.raises(UserError, match="it is of step 2, and its name says otherwise"):
        train(run_of(folder, 3), resume="auto" if resume == "auto" else str(checkpoints / "step-1"))


@pytest.mark.parametrize("how", ["missing", "edited"])
def test_the_note_itself(how: str, folder: Path) -> None:
    file = folder / "run" / "inputs.json"
    if how == "missing":
        file.unlink()
    else:
        file.write_text(file.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(UserError, match=r"inputs\.json' (is missing; copy it back|was changed)"):
        resumed(folder, "auto")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("base", "dtype"), [("nf4", "bf16"), ("nf4", "fp32"), ("bf16", "bf16")])
def test_quantized_by_an_earlier_version(
    base: str, dtype: str, small_model: Path, small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which rounded float32 weights to the compute dtype: a resumed run would train on another base."""

    def run(steps: int) -> RunConfig:
        model = {"path": str(small_model), "base": base, "dtype": dtype}
        return small.run_config(small_model, small_data, tmp_path / "run", model=model, train={"steps": steps})

    train(run(1))
    folder = RunFolder(tmp_path / "run")
    for file in folder.path.rglob("inputs.json"):
        said = json.loads(file.read_text())
        assert said.pop("quantization") == 2
        file.write_text(sealed({key: value for key, value in said.items() if key != "seal"}))
    write_manifest(folder.checkpoints()[0], 1)
    if (base, dtype) != ("nf4", "bf16"):  # nothing is quantized, or nothing was rounded before
        train(run(2), resume="auto")
        return
    assert any("an earlier version rounded" in note for note in open_run(folder.path).notes)
    with pytest.raises(UserError, match="cannot be resumed: an earlier version rounded the weights"):
        train(run(2), resume="auto")
