"""A run that goes on is given what it began with: data, configuration, tokenizer, and its own checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.json_files import sealed
from moetune.training.folder.manifest import write_manifest
from moetune.training.folder.run_folder import RunFolder
from tests import small
from tests.resolved import train


@pytest.fixture(scope="module")
def begun(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(small_model, folder / "model")
    for name in ("train", "eval"):
        small.write_data(folder / f"{name}.jsonl", small.DATA if name == "train" else small.DATA[:3])
    (folder / "model" / "generation_config.json").write_text("{}")
    train(run_of(folder, 2))
    return folder


def run_of(folder: Path, steps: int) -> RunConfig:
    data = {"eval": str(folder / "eval.jsonl")}
    train_ = {"steps": steps, "save_every": 1}
    return small.run_config(folder / "model", folder / "train.jsonl", folder / "run", data=data, train=train_)


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    """The run with its data and its base, elsewhere: the run file says where."""
    copy = Path(shutil.copytree(begun, tmp_path / "copy"))
    for file in copy.rglob("run.yaml"):
        file.write_text(file.read_text().replace(str(begun), str(copy)))
    for checkpoint in RunFolder(copy / "run").checkpoints():
        write_manifest(checkpoint, int(checkpoint.name[5:]))
    return copy


def resumed(folder: Path, resume: str = "auto") -> None:
    train(run_of(folder, 3), resume="auto" if resume == "auto" else str(folder / "run" / "checkpoints" / resume))


def test_a_base_in_several_precisions(configure: small.Configure) -> None:
    """It is compared by what it says, however that is written."""

    def run(steps: int, layers: object) -> RunConfig:
        model = {"base": {"default": "nf4", "layers": layers}}
        return configure(model=model, train={"steps": steps})

    train(run(1, {"0": "fp32", 1: {"experts": "int8"}}))
    train(run(2, {1: {"experts": "int8"}, 0: "fp32"}), resume="auto")
    with pytest.raises(UserError, match=r"model\.base\.layers\.1\.experts: 'int8' before, None now"):
        train(run(3, {"0": "fp32"}), resume="auto")


BOTH = pytest.mark.parametrize("resume", ["auto", "step-2"])


def test_a_schedule_over_more_steps(configure: small.Configure, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (1, 2):
        train_ = {"steps": steps, "schedule": "cosine"}
        train(configure(train=train_), resume="auto")
    assert "the cosine schedule of 1 steps is now that of 2, so learning rates jump" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        # even where the number of tokens stays
        ("train.jsonl", "router", "retour", r"data\.train has changed since it began: its tokens differ"),
        ("run/inputs.json", '"schema": 1', '"schema": 2', r"inputs\.json' was changed"),
        ("run/inputs.json", None, "", r"inputs\.json' cannot be read: No such file.*; copy it back"),
    ],
)
def test_edited_in_place(file: str, old: str | None, new: str, message: str, folder: Path) -> None:
    path = folder / file
    if old is None:
        path.unlink()
    else:
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        resumed(folder)


def test_held_out_data_edited(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_data(folder / "eval.jsonl", small.DATA[3:6])
    resumed(folder)
    assert "data.eval has changed since the run began: held-out losses before and after" in capsys.readouterr().err


def test_configuration_edited(folder: Path) -> None:
    file = folder / "model" / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"transformers_version": "9"}))
    train(run_of(folder, 2), resume="auto")
    file.write_text(json.dumps(said | {"rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match=r"config\.json of the base: rms_norm_eps is 0\.5, and was"):
        resumed(folder)


def test_files_beside_the_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Harmless as long as the data's tokens are the same; else they are named as a reason."""
    (folder / "model" / "generation_config.json").write_text('{"do_sample": true}')
    resumed(folder)
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
def test_a_checkpoint_of_another_run(resume: str, folder: Path) -> None:
    """Of the same run file, even."""
    checkpoint = folder / "run" / "checkpoints" / "step-2"
    inputs = json.loads((checkpoint / "inputs.json").read_text()) | {"run": "another"}
    (checkpoint / "inputs.json").write_text(sealed({name: inputs[name] for name in inputs if name != "seal"}))
    write_manifest(checkpoint, 2)
    with pytest.raises(UserError, match="is of another run than"):
        resumed(folder, resume)


def test_a_checkpoint_by_another_name(folder: Path) -> None:
    checkpoints = folder / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-1")
    (checkpoints / "step-2").rename(checkpoints / "step-1")
    with pytest.raises(UserError, match="it is of step 2, and its name says otherwise"):
        resumed(folder)
