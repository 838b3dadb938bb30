"""What trains nothing, or nothing of use, is said on the terminal and in the metrics."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetune.adapt.count import count_trainable
from moetune.errors import UserError
from moetune.training.run_warnings import RunWarnings
from tests import small
from tests.parallel.pipelines import write_toy
from tests.resolved import build, train

Err = pytest.CaptureFixture[str]


def said(capsys: Err) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]


def changed(model: Path, folder: Path, change: Any) -> Path:
    """A copy of a model with other weights."""
    copy = Path(shutil.copytree(model, folder))
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        change(name, tensor)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_run_that_learns_says_nothing(configure: small.Configure, tmp_path: Path, capsys: Err) -> None:
    train(configure("lora"))
    assert said(capsys) == []
    for line in small.read_metrics(tmp_path / "run"):
        assert (line["idle_experts"], line["unchanged"], line["notices"]) == (0, [], [])


def test_updates_that_round_away(configure: small.Configure, tmp_path: Path, capsys: Err) -> None:
    optimizer = {"name": "sgd", "lr": 1e-12}
    train(configure("router", optimizer=optimizer))
    assert any("no weight of router has changed" in note for note in said(capsys))
    assert small.read_metrics(tmp_path / "run")[-1]["unchanged"] == ["router"]


def test_a_warmup_that_has_not_begun_is_none(configure: small.Configure, capsys: Err) -> None:
    train(configure("router", train={"warmup": 2}))
    assert said(capsys) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("sections", "note"),
    [
        ({"train": {"eval_every": 2}}, "nothing is held out"),
        ({"train": {"eval_micro_batch": 2}}, "nothing is held out"),
        ({"train": {"eval_every": 2}, "data": {"validation": 0.2}}, None),
        ({"parallel": {"load": "load.json"}}, "parallel.load is not read"),
        ({"parallel": {"zero": 2}}, "parallel.zero and reshard change nothing"),
        ({"parallel": {"reshard": False}}, "parallel.zero and reshard change nothing"),
    ],
)
def test_a_setting_that_changes_nothing(
    sections: dict[str, Any], note: str | None, small_model: Path, small_data: Path, tmp_path: Path, capsys: Err
) -> None:
    train(small.run_config(small_model, small_data, tmp_path / "run", "router", **sections))
    assert [note is not None and note in line for line in said(capsys)] == [True] * (note is not None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "value", "note"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", "ACCELERATE_MIXED_PRECISION=fp16 of accelerate changes nothing"),
        ("ACCELERATE_USE_FSDP", "false", None),
        ("CUDA_VISIBLE_DEVICES", "7", "CUDA_VISIBLE_DEVICES=7 names no GPU"),
        ("CUDA_VISIBLE_DEVICES", "-1", None),
    ],
)
def test_variables_that_change_nothing(
    name: str, value: str, note: str | None, configure: small.Configure, monkeypatch: pytest.MonkeyPatch, capsys: Err
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    train(configure("router", train={"steps": 1}))
    assert [note is not None and note in line for line in said(capsys)] == [True] * (note is not None)


@pytest.mark.parametrize("coefficient", [0, "auto"])
def test_a_loss_that_only_the_configuration_asks_for(coefficient: Any, tmp_path: Path, capsys: Err) -> None:
    model = small.write_model(tmp_path / "model", output_router_logits=True)
    data, train_ = small.write_data(tmp_path / "data.jsonl"), {"router_aux_loss": coefficient, "steps": 1}
    train(small.run_config(model, data, tmp_path / "run", "router", train=train_))
    assert ["router_aux_loss is 0" in note for note in said(capsys)] == [True] * (coefficient == 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "is_said"), [("bf16", True), ("fp16", False), ("fp32", False)])
def test_a_checkpoint_in_float16_that_is_rounded(dtype: str, is_said: bool, tmp_path: Path, capsys: Err) -> None:
    model, data = small.write_model(tmp_path / "model"), small.write_data(tmp_path / "data.jsonl")
    settings = json.loads((model / "config.json").read_text()) | {"dtype": "float16"}
    (model / "config.json").write_text(json.dumps(settings))
    optimizer = {"master_weights": "fp32" if dtype != "fp32" else "none"}
    sections = {"model": {"dtype": dtype}, "optimizer": optimizer, "train": {"steps": 1}}
    train(small.run_config(model, data, tmp_path / "run", "router", **sections))
    assert ["model.dtype: fp16" in note for note in said(capsys)] == [True] * is_said


@pytest.mark.parametrize("packing", [True, False])
def test_documents_longer_than_the_model_has_positions(packing: bool, tmp_path: Path, capsys: Err) -> None:
    model = small.write_model(tmp_path / "model", max_position_embeddings=16)
    data = small.write_data(tmp_path / "data.jsonl")
    train(small.run_config(model, data, tmp_path / "run", "router", data={"packing": packing}))
    (note,) = said(capsys)
    assert "the model has 16 positions" in note
    assert small.read_metrics(tmp_path / "run")[0]["notices"] == ["long positions"]


def test_documents_beyond_the_short_factors_of_phimoe(tmp_path: Path, capsys: Err) -> None:
    model, data = write_toy(tmp_path / "model", "phimoe", 2), small.write_data(tmp_path / "data.jsonl")
    settings = json.loads((model / "config.json").read_text())
    factors = [1.0] * (settings["hidden_size"] // settings["num_attention_heads"] // 2)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": factors, "long_factor": factors, "short_mscale": 1.0, "long_mscale": 1.0}
    (model / "config.json").write_text(json.dumps(settings | {"rope_parameters": rope}))
    train(small.run_config(model, data, tmp_path / "run", "router", train={"steps": 1}))
    assert ["positions beyond 16 by the factors for short" in note for note in said(capsys)] == [True]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_base_that_is_not_finite(
    name: str, packing: bool, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    """In the precision of the run: what is not finite in a file is refused when it is read."""
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors[name] = torch.full_like(tensors[name], 1e300, dtype=torch.float64)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"^{name} of the base holds values that are not finite"):
        train(small.run_config(model, small_data, tmp_path / "run", "router", data={"packing": packing}))


@pytest.mark.parametrize(("packing", "also", "is_said"), [(True, (), True), (False, ("embedding", "lm_head"), False)])
def test_tokens_that_the_base_has_not_learnt(
    packing: bool,
    also: tuple[str, ...],
    is_said: bool,
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    capsys: Err,
) -> None:
    """As those of chats in a base model: here the end of a text."""
    model = changed(small_model, tmp_path / "model", lambda name, tensor: tensor[2].zero_() if len(tensor) > 999 else 0)
    config = small.run_config(model, small_data, tmp_path / "run", "router", data={"packing": packing})
    train(config.but(adapt={"also": also}, train={"steps": 1}))
    assert ["1 token of the data (ids 2) are zero" in note for note in said(capsys)] == [True] * is_said


@pytest.mark.parametrize("packing", [True, False])
def test_a_pad_token_without_an_embedding(packing: bool, small_model: Path, small_data: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"pad_token": "<beyond>"}))
    with pytest.raises(UserError, match=r"pads with token \d+; the model has embeddings for \d+ only"):
        train(small.run_config(model, small_data, tmp_path / "run", "router", data={"packing": packing}))


@pytest.fixture
def watched(small_model: Path) -> tuple[RunWarnings, io.StringIO]:
    """Experts 0 and 2 train whole in both layers, with the router of layer 1."""
    adapted = build(small.run_config(small_model, Path("unused"), Path("unused"), "experts"), "cpu")
    said = io.StringIO()
    return RunWarnings(adapted, count_trainable(adapted)["total"], Console(file=said, width=1000)), said


def layers(*load: list[int]) -> dict[int, Tensor]:
    return {layer: torch.tensor(tokens, dtype=torch.float) for layer, tokens in enumerate(load)}


def test_experts_without_tokens_are_named_once(watched: tuple[RunWarnings, io.StringIO]) -> None:
    notices, said = watched
    line = notices.about_step(True, {}, layers([10, 10, 0, 0], [5, 5, 5, 5]))
    assert line["idle_experts"] == 1
    assert "no token has reached" not in said.getvalue()  # too early to tell
    notices.about_step(True, {}, layers([100, 100, 0, 0], [50, 50, 50, 50]))
    each = notices.adapted.structure.moe_layers[0].shape.parameters_per_expert
    share = f"{100 * each / notices.trained:.1f} % of the trained parameters"
    assert f"no token has reached 1 expert to be trained (layer:expert 0:2): {share}" in said.getvalue()
    notices.at_end(layers([200, 200, 0, 0], [100, 100, 100, 100]))
    assert said.getvalue().count("no token has reached") == 1


def test_a_collapse_is_said_of_its_layer(watched: tuple[RunWarnings, io.StringIO]) -> None:
    notices, said = watched
    for load in ([[60, 40, 60, 40], [60, 40, 60, 40]], [[100, 1, 100, 1], [40, 50, 50, 50]]):
        assert "collapsed" not in said.getvalue()
        line = notices.about_step(False, layers(*load), {})
    assert said.getvalue().count("collapsed") == 1
    assert "routing of layer 0 has collapsed: of 4 experts 2.1 are in use" in said.getvalue()
    assert line["notices"] == ["collapsed routers"]
