"""Damaged model folders: a model, or one short message; nothing is opened by pickle, and nothing runs."""

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM

from moetune.adapt.build import build
from moetune.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from moetune.errors import UserError
from moetune.run.resolve import resolve, resolve_model
from moetune.tensor_files import INDEX_FILE, read_headers
from moetune.training.data.load import load_data, tokenizer_of
from tests.fuzz.damage import answer, cases, damaged_json, garbled_bytes, write

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in several files, with an index."""
    folder = tmp_path_factory.mktemp("fuzzed") / "model"
    MixtralForCausalLM.from_pretrained(small_model).save_pretrained(folder, max_shard_size="200KB")
    for name in TOKENIZER:
        shutil.copy(small_model / name, folder)
    assert (folder / INDEX_FILE).is_file()
    return folder


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    monkeypatch.setattr(pickle, "load", opened)
    monkeypatch.setattr(pickle, "Unpickler", opened)


def read_model(folder: Path) -> None:
    resolve_model(ModelConfig(path=str(folder)))


def read_tokenizer(folder: Path, data: Path) -> None:
    source = resolved_source(folder)
    load_data(
        DataConfig(train=str(data), packing=False),
        tokenizer_of(source.name, source.folder),
        TrainConfig(sequence_length=64),
    )


def resolved_source(folder: Path) -> Any:
    from moetune.models.source import find_model_source

    return find_model_source(str(folder))


@pytest.mark.usefixtures("no_pickles")
def test_configurations(pytestconfig: pytest.Config, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    file, whole = folder / "config.json", (model / "config.json").read_text()
    refused = 0
    for seed in cases(pytestconfig):
        raw = damaged_json(whole, random.Random(seed))
        file.write_bytes(raw)
        refused += isinstance(answer(seed, lambda: read_model(folder), lambda raw=raw: repr(raw)), UserError)
    assert len(cases(pytestconfig)) / 10 < refused < len(cases(pytestconfig))


@pytest.mark.usefixtures("no_pickles")
def test_tokenizers(pytestconfig: pytest.Config, model: Path, small_data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    refused = 0
    seeds = cases(pytestconfig, push=50)
    for seed in seeds:
        draw = random.Random(seed)
        name = draw.choice(TOKENIZER[:2])
        whole = (model / name).read_text()
        raw = damaged_json(whole, draw)
        (folder / name).write_bytes(raw)
        read = lambda: read_tokenizer(folder, small_data)  # noqa: E731
        refused += isinstance(answer(seed, read, lambda name=name, raw=raw: f"{name}: {raw!r}"), UserError)
        (folder / name).write_text(whole)
    assert len(seeds) / 20 < refused < len(seeds)


@pytest.mark.usefixtures("no_pickles")
def test_weights(pytestconfig: pytest.Config, model: Path, tmp_path: Path) -> None:
    """Headers and indexes; what still reads well is loaded, now and then."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    names = [INDEX_FILE, *sorted(file.name for file in model.glob("*.safetensors"))]
    refused = loaded = 0
    for seed in cases(pytestconfig):
        draw = random.Random(seed)
        name = draw.choice((INDEX_FILE, draw.choice(names)))
        whole = (model / name).read_bytes()
        raw = damaged_json(whole.decode(), draw) if name == INDEX_FILE else damaged_header(whole, draw)
        (folder / name).write_bytes(raw)
        found = answer(seed, lambda: read_headers(folder), lambda name=name, raw=raw: f"{name}: {raw[:1500]!r}")
        refused += isinstance(found, UserError)
        if not isinstance(found, UserError) and loaded < len(cases(pytestconfig)) / 25:
            loaded += 1
            answer(seed, lambda: load(folder), lambda name=name, raw=raw: f"{name}: {raw[:1500]!r}")
        (folder / name).write_bytes(whole)
    assert loaded
    assert len(cases(pytestconfig)) / 10 < refused < len(cases(pytestconfig))


def damaged_header(whole: bytes, draw: random.Random) -> bytes:
    length = int.from_bytes(whole[:8], "little")
    if draw.random() < 0.3:
        return garbled_bytes(whole[: 8 + length], draw) + whole[8 + length :]
    header = damaged_json(whole[8 : 8 + length].decode(), draw)
    return len(header).to_bytes(8, "little") + header + whole[8 + length :]


def load(folder: Path) -> None:
    run = {"model": {"path": str(folder), "base": "fp32"}, "adapt": {"router": "all"}}
    build(resolve(RunConfig.model_validate(run), "cpu"), "cpu")


@pytest.mark.usefixtures("no_pickles")
@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "evil.bin", "/etc/passwd", "pytorch_model.bin", "a/b.safetensors"]
)
def test_an_index_names_safetensors_beside_it_only(name: str, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    write(folder / INDEX_FILE, json.dumps(index).encode())
    (folder / "evil.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UserError, match="which is no safetensors file beside it"):
        load(folder)


def test_only_pickles(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="only safetensors checkpoints are read") as raised:
        load(folder)
    assert "weights_only" not in str(raised.value)
