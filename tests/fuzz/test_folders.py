"""Damaged run folders, and checkpoints that were sealed again."""

import copy
import functools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.adapt.weights.quantized_base import check_quantized_base
from moetune.config import load as run_file
from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.json_files import sealed
from moetune.models.quantized_manifest import read_quantized_manifest
from moetune.run.resolve import resolve
from moetune.training import same_run
from moetune.training.folder import checkpoint as checkpoints
from moetune.training.folder import trainer_state
from moetune.training.folder.manifest import write_manifest
from moetune.training.folder.run_folder import step_of
from moetune.training.folder.run_writer import RunWriter
from moetune.training.optim.optimizers import make_optimizer
from tests import small
from tests.fuzz.damage import answer, cases, damaged_json, damaged_yaml, garbled_bytes, write
from tests.resolved import build, train, write_quantized_base

Written = dict[str, Any]


@pytest.fixture(scope="module")
def written(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A run and a packed base; and what reads them, built once."""
    folder = tmp_path_factory.mktemp("written")
    settings = {"steps": 2, "save_every": 1}
    run = small.run_file(small_model, small_data, folder / "run", "lora", train=settings)
    train(RunConfig.model_validate(run))
    write_quantized_base(str(small_model), folder / "packed", "nf4", double_quant=True)
    config = resolve(RunConfig.model_validate(run), "cpu").config
    adapted = build(config, "cpu")
    return {
        "folder": folder, "run": run, "config": config, "adapted": adapted, "optimizer": make_optimizer(adapted),
        "resolved": resolve(config, "cpu")
    }  # fmt: skip


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML takes longer over the files that are whole than all else takes over those that are not."""
    once = functools.lru_cache(maxsize=32)(run_file.parse)
    for module in (run_file, same_run):
        monkeypatch.setattr(module, "parse", lambda text, what: copy.deepcopy(once(text, what)))


def read_packed(path: Path, written: Written) -> None:
    run = written["resolved"]
    source = replace(run.model.source, folder=str(path), quantized_base=read_quantized_manifest(path))
    check_quantized_base(replace(run, model=replace(run.model, source=source)))


def read_run(path: Path, written: Written) -> None:
    """All that resuming and exporting read of a run folder before a step is taken."""
    folder, adapted = RunWriter(path), written["adapted"]
    folder.metrics()
    newest = folder.check(written["config"].model_copy(update={"output": str(path)}), "auto", overwrite=False)
    folder.base()
    if newest is None:
        return
    folder.inputs(newest)
    load_run_config(path / "run.yaml")
    with trainer_state.refusing_damage(newest):
        trainer_state.read_state(newest)
        trainer_state.read_generators(newest, 0, adapted.model.device)
        checkpoints.read_trained(newest, adapted)
        trainer_state.read_total_load(newest, adapted)
        checkpoints.read_optimizer(newest, adapted, written["optimizer"])


def damaged_file(raw: bytes, name: str, draw: random.Random) -> bytes:
    if name.endswith(".yaml"):
        return damaged_yaml(yaml.safe_load(raw), draw)
    if name.endswith(".json"):
        return damaged_json(raw.decode(), draw)
    return garbled_bytes(raw, draw)


def seal_again(file: Path, path: Path, draw: random.Random) -> None:
    """As one would who can write there: digests fit what is there now."""
    if "checkpoints" in file.parts and file.name != "manifest.json":
        newest = next(parent for parent in file.parents if parent.parent.name == "checkpoints")
        write_manifest(newest, step_of(newest))
    elif file.name in ("base.json", "inputs.json"):
        try:
            raw = json.loads(file.read_bytes())
            raw.pop("seal", None), raw.pop("schema", None)
            file.write_text(sealed(raw))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass


def test_run_folders(pytestconfig: pytest.Config, written: Written, tmp_path: Path) -> None:
    answers = []
    path = Path(shutil.copytree(written["folder"] / "run", tmp_path / "run"))
    whole = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    read_run(path, written)
    for seed in cases(pytestconfig):
        draw = random.Random(seed)
        for file in draw.sample(list(whole), draw.choice((1, 1, 2))):
            if draw.random() < 0.1:
                file.unlink()
                continue
            file.write_bytes(damaged_file(whole[file], file.name, draw))
            if draw.random() < 0.8:
                seal_again(file, path, draw)
        changed = [str(file) for file in whole if not file.is_file() or file.read_bytes() != whole[file]]
        answers.append(answer(seed, lambda: read_run(path, written), lambda c=changed: repr(c)))
        for file, raw in whole.items():
            if not file.is_file() or file.read_bytes() != raw:
                write(file, raw)
    assert len(answers) / 10 < sum(isinstance(one, UserError) for one in answers) < len(answers)


def test_a_manifest_names_files_of_its_folder_only(written: Written, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written["folder"] / "packed", tmp_path / "packed"))
    said = json.loads((folder / "packed.json").read_text())
    name = next(iter(said["files"]))
    for outside in (f"../packed/{name}", str(folder / name), "..", f"./{name}", "a/b.safetensors", "evil.bin"):
        (folder / "packed.json").write_text(json.dumps(said | {"files": {outside: said["files"][name]}}))
        with pytest.raises(UserError, match=r"packed\.json' cannot be read: files\..* is no file of the folder"):
            read_packed(folder, written)
