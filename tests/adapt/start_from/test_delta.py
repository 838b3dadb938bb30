"""A delta read back: what trains has the values that were exported, whatever the layout of the checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetune.adapt.build import Adapted
from moetune.adapt.start_from.delta import check_delta, load_delta
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.models.hub.delta_folder import Delta, read_delta
from moetune.models.hub.fingerprint import digest
from tests.exporting.runs import ADAPT, FULL, ToyRun, write_run
from tests.reference import run_config
from tests.resolved import build

TYPES = ["mixtral", "qwen2_moe", "deepseek_v2", "gpt_oss", "granitemoe", "llama4_text"]


def exported(run: ToyRun, out: Path) -> Delta:
    export(run.path, "delta", out)
    return read_delta(out)


def adapted_config(run: ToyRun, adapt: dict[str, Any]) -> RunConfig:
    return run_config(run.base, adapt, model=run.config.model.model_dump())


def fresh(run: ToyRun, adapt: dict[str, Any]) -> Adapted:
    """The model before training, with another choice of what trains."""
    return build(adapted_config(run, adapt), "cpu")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("adapt", ["full", "all"])
@pytest.mark.parametrize("model_type", TYPES)
def test_every_value_comes_back(model_type: str, adapt: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base(model_type), ADAPT[adapt])
    adapted = fresh(run, ADAPT[adapt])
    trained = run.adapted.trainable()
    assert not any(parameter.equal(trained[name]) for name, parameter in adapted.trainable().items())
    assert load_delta(adapted, exported(run, tmp_path / "delta")) == ()
    for name, parameter in adapted.trainable().items():
        assert parameter.equal(trained[name]), name
    check_delta(build(adapted_config(run, ADAPT[adapt]), "meta"), read_delta(tmp_path / "delta"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_not_in_it_stays_and_is_said(model_type: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base(model_type), FULL)
    more = {"router": "all", "experts": {"layers": "1", "ids": [0, 3, 5]}, "also": ["norm"]}
    adapted = fresh(run, more)
    before = {name: parameter.clone() for name, parameter in adapted.trainable().items()}
    (note,) = load_delta(adapted, exported(run, tmp_path / "delta"))
    assert note.startswith("not in the delta, so it starts from the base's values: model.layers.")
    trained = run.adapted.trainable()
    for name, parameter in adapted.trainable().items():
        assert parameter.equal(trained.get(name, before[name])), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_what_would_be_ignored_is_named(model_type: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base(model_type), FULL)
    delta = exported(run, tmp_path / "delta")
    adapted = fresh(run, FULL | {"experts": {"layers": "1", "ids": [0]}})
    before = {name: parameter.clone() for name, parameter in adapted.trainable().items()}
    five = r"experts\.5\..*weight" if not delta.slices else r" of expert 5"
    with pytest.raises(UserError, match=rf"{five} is in the delta, but does not train"):
        load_delta(adapted, delta)
    assert all(parameter.equal(before[name]) for name, parameter in adapted.trainable().items())


def test_another_shape_is_named(base: Callable[[str], Path], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base("mixtral"), FULL)
    exported(run, tmp_path / "delta")
    file, manifest = tmp_path / "delta" / "delta.safetensors", tmp_path / "delta" / "manifest.json"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(7)
    tensors["model.layers.1.block_sparse_moe.experts.5.w1.weight"] = torch.zeros(3, 5)
    save_file(tensors, file)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sha256": digest(file)}))
    with pytest.raises(UserError) as raised:
        check_delta(fresh(run, FULL), read_delta(tmp_path / "delta"))
    assert "model.norm.weight is [7] in the delta, and [32] here" in str(raised.value)
    assert "experts.5.w1.weight and the tensors that belong with it do not form" in str(raised.value)
