"""`base.json`: which base a run was trained on. Another one is named, on resume and by every export."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file, save_file

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.models.hub.fingerprint import take_fingerprint
from moetune.training.folder.run_folder import RunFolder
from tests import small
from tests.resolved import train, write_quantized_base

ADAPT: dict[str, Any] = {"router": "all", "lora": {"rank": 2, "alpha": 4, "targets": ["attention"]}}
FORMATS: tuple[Literal["delta", "peft", "merged"], ...] = ("delta", "peft", "merged")


@pytest.fixture
def config(small_model: Path, small_data: Path, tmp_path: Path) -> RunConfig:
    """A run on a base of its own, which a test may change."""
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    return small.run_config(base, small_data, tmp_path / "run", adapt=ADAPT, model={"base": "fp32"}, train={"steps": 1})


def longer(config: RunConfig, steps: int = 2) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def change(base: Path) -> None:
    """One value of a tensor that nothing trains."""
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][0, 0] += 1
    save_file(tensors, base / "model.safetensors")


def test_it_is_written_whole(config: RunConfig, tmp_path: Path) -> None:
    train(config)
    written = json.loads((tmp_path / "run" / "base.json").read_text())
    assert (written["schema"], written["name"]) == (1, "base")
    assert written["fingerprint"] == take_fingerprint(tmp_path / "base").to_json()
    train(longer(config), resume="auto")
    assert json.loads((tmp_path / "run" / "base.json").read_text()) == written
    train(config, overwrite=True)
    assert json.loads((tmp_path / "run" / "base.json").read_text()) == written


def test_random_weights_have_no_base(config: RunConfig, tmp_path: Path) -> None:
    random = config.model_copy(update={"model": config.model.model_copy(update={"weights": "random"})})
    train(random)
    assert not (tmp_path / "run" / "base.json").exists()
    train(longer(random), resume="auto")


def test_a_changed_base_is_named_on_resume_and_by_every_export(config: RunConfig, tmp_path: Path) -> None:
    train(config)
    change(tmp_path / "base")
    before = sorted(tmp_path.rglob("*"))
    reason = r"the same tensors with other values \(model\.safetensors\)"
    with pytest.raises(UserError, match=rf"the base in '.*base' has changed since the run in '.*run' .*: {reason}"):
        train(longer(config), resume="auto")
    for format_ in FORMATS:
        with pytest.raises(UserError, match=rf"the base in '.*base' has changed since the run in '.*run' .*: {reason}"):
            export(tmp_path / "run", format_, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_other_tensors_are_named_before_anything_is_copied(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    save_file(tensors | {"more": tensors["model.norm.weight"].clone()}, tmp_path / "base" / "model.safetensors")
    monkeypatch.setattr("moetune.models.hub.fingerprint.digest", None)
    for format_ in FORMATS:
        with pytest.raises(UserError, match=r"more is F32 \[64\], not no such tensor"):
            export(tmp_path / "run", format_, tmp_path / "out")


def test_a_flipped_byte_is_named(config: RunConfig, tmp_path: Path) -> None:
    train(config)
    file = tmp_path / "run" / "base.json"
    whole = file.read_bytes()
    for position in (0, 100, -70):
        data = bytearray(whole)
        data[position] ^= 1
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"base\.json'.* --resume auto records it again"):
            train(longer(config), resume="auto")
        with pytest.raises(UserError, match=r"base\.json', "):
            export(tmp_path / "run", "delta", tmp_path / "out")


def test_one_that_is_missing_is_said_and_noted_anew(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By resuming only, finished or not: an export could not tell whether the base is the one."""
    train(config)
    file = tmp_path / "run" / "base.json"
    whole = file.read_bytes()
    for steps in (1, 2):
        file.unlink()
        for format_ in FORMATS:
            with pytest.raises(UserError, match=r"base\.json' is missing, .* --resume auto records it again"):
                export(tmp_path / "run", format_, tmp_path / "out")
        capsys.readouterr()
        train(longer(config, steps), resume="auto")
        assert "base.json is missing: whether" in capsys.readouterr().err
        assert file.read_bytes() == whole


def test_a_packed_base_brings_that_of_what_was_packed(config: RunConfig, tmp_path: Path) -> None:
    write_quantized_base(str(tmp_path / "base"), tmp_path / "packed", "nf4", True)
    model = config.model.model_copy(update={"path": str(tmp_path / "packed"), "base": "nf4"})
    train(config.model_copy(update={"model": model}))
    noted = RunFolder(tmp_path / "run").base()
    assert noted is not None
    assert (noted.name, noted.fingerprint) == ("base", take_fingerprint(tmp_path / "base"))
    change(tmp_path / "base")
    for format_ in FORMATS:
        with pytest.raises(UserError, match=r"has changed since the run"):
            export(tmp_path / "run", format_, tmp_path / "out")


def test_an_adapter_of_factors_alone_does_without_the_source_of_a_packed_base(
    config: RunConfig, tmp_path: Path
) -> None:
    write_quantized_base(str(tmp_path / "base"), tmp_path / "packed", "nf4", True)
    model = config.model.model_copy(update={"path": str(tmp_path / "packed"), "base": "nf4"})
    adapt = config.adapt.model_copy(update={"router": "none"})
    train(config.model_copy(update={"model": model, "adapt": adapt}))
    shutil.rmtree(tmp_path / "base")
    export(tmp_path / "run", "peft", tmp_path / "out")
    with pytest.raises(UserError, match=r"an export needs the checkpoint that was quantized, and '.*base' is gone"):
        export(tmp_path / "run", "merged", tmp_path / "merged")


SCRIPT = """
import json, sys
from pathlib import Path
from moetune.config.load import load_run_config
from moetune.errors import UserError
from moetune.exporting.export import export
from tests.resolved import train

def refusal(attempt, *args):
    try:
        attempt(*args)
    except UserError as error:
        return str(error)

config = load_run_config(Path("run.yaml"))
partial = config.model_copy(update={"model": config.model.model_copy(update={"path": "someone/no-weights"})})
print(refusal(train, partial))
assert not Path("run").exists()
train(config)
for format in ("delta", "peft", "merged"):
    export(Path("run"), format, Path(format))
train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})}), resume="auto")
weights = next(Path("cache").rglob("model.safetensors"))
data = bytearray(weights.read_bytes())
data[-1] ^= 1
weights.write_bytes(data)
print(refusal(export, Path("run"), "merged", Path("other")))
"""


@pytest.mark.full
def test_models_on_the_hub(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """By their ids: what is in the cache is trained on, noted, exported and compared, all without a network; a model
    of which the cache has only the configuration is refused."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    for name in ("small-mixtral", "no-weights"):
        repository = tmp_path / "cache" / f"models--someone--{name}"
        snapshot = repository / "snapshots" / commit
        shutil.copytree(small_model, snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    (snapshot / "model.safetensors").unlink()
    run = small.run_file(Path("someone/small-mixtral"), small_data, Path("run"), adapt=ADAPT, model={"base": "fp32"})
    (tmp_path / "run.yaml").write_text(RunConfig.model_validate(run).to_yaml())
    where = {"HF_HUB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[3])}
    environment = os.environ | where | {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "'someone/no-weights' cannot be downloaded from the hub" in ended.stdout.splitlines()[0]
    assert f"{commit}' has changed since the run in 'run'" in ended.stdout
    noted = RunFolder(tmp_path / "run").base()
    assert noted is not None
    assert (noted.name, noted.fingerprint) == ("someone/small-mixtral", take_fingerprint(small_model))
    assert take_fingerprint(tmp_path / "merged").tensors == noted.fingerprint.tensors
    assert not (tmp_path / "other").exists()


def test_every_file_has_the_permissions_that_the_umask_says(
    small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        train(small.run_config(small_model, small_data, tmp_path / "run", "lora", train={"steps": 1}))
        write_quantized_base(str(small_model), tmp_path / "packed", "nf4", double_quant=True)
    finally:
        os.umask(before)
    written = [file for folder in ("run", "packed") for file in (tmp_path / folder).rglob("*") if file.is_file()]
    assert len(written) > 10
    assert {file.stat().st_mode & 0o777 for file in written} == {0o640}
