"""Tables in host memory: values of the ordinary run, bit for bit; where they are, how they are read; refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moetune.adapt.build import build as build_resolved
from moetune.adapt.layers.table import HostTable
from moetune.compat.torch import without_host_tensors
from moetune.errors import UserError
from moetune.experts.host import stays_on_host
from moetune.exporting.export import export
from moetune.inference.evaluate import evaluate
from moetune.inference.opened import open_model
from moetune.memory.predict import predict_memory
from moetune.memory.trace import trace
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve
from tests import small
from tests.memory.models import toy_run, write_toy
from tests.parallel import pipelines
from tests.reference import build_toy, loss_and_gradients, token_ids
from tests.resolved import build, train
from tests.thinned import thinned
from tests.toys import toy_config, toy_model

HOST = {"embeddings_on": "host"}
TABLES = {
    "gemma4_text": ["model.embed_tokens_per_layer"],  # the other is tied
    "mixtral": ["model.embed_tokens"],
    "gemma3n_text": ["model.embed_tokens_per_layer"],
    "inkling_text": ["model.embed_tokens"],  # with a norm, which is on the device
    "gpt2": ["transformer.wpe"],
    "qwen4_exp_text": ["model.layers.1.ple.ple_embedding.ngram_embedding"],  # the other is read where no ids are given
}
SETTINGS: dict[str, dict[str, Any]] = {"qwen4_exp_text": {"ple_layer_ids": [2], "eos_token_id": 1}}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", thinned(TABLES, 9, ("inkling_text", "gpt2", "qwen4_exp_text")))
def test_losses_and_gradients_are_those_of_a_table_on_the_gpu(model_type: str, tmp_path: Path) -> None:
    for number, model in enumerate(({}, HOST)):
        config = toy_config(model_type, **SETTINGS.get(model_type, {}))
        adapted = build_toy(config, tmp_path / str(number), {"also": ["norm"]}, model=model)
        found = [path for path, module in adapted.model.named_modules() if isinstance(module, HostTable)]
        assert found == (TABLES[model_type] if model else [])
        loss, gradients = loss_and_gradients(adapted, token_ids())
        if number == 0:
            expected, expected_gradients = loss, gradients
    assert torch.equal(loss, expected)
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in gradients)
    table = adapted.model.get_submodule(TABLES[model_type][0])
    assert stays_on_host(table.weight)
    assert not any(stays_on_host(tensor) for tensor in table.buffers() if tensor is not table.weight)
    adapted.model.to(torch.float64)  # leaves the table where, and as, it is
    assert stays_on_host(table.weight)
    assert table.weight.dtype == torch.float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_model(tmp_path_factory.mktemp("of") / "model", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_data(tmp_path_factory.mktemp("data") / "rows.jsonl")


def test_a_run_is_the_ordinary_run_to_its_export(model: Path, data: Path, tmp_path: Path) -> None:
    """Trained, evaluated, merged."""
    for name, settings in (("gpu", {}), ("host", HOST)):
        config = small.run_config(model, data, tmp_path / name, "lora", model=settings, train={"steps": 2})
        train(config, device="cpu")
        export(tmp_path / name, "merged", tmp_path / f"{name}-merged")
    merged = [load_file(tmp_path / f"{name}-merged" / "model.safetensors") for name in ("gpu", "host")]
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])
    opened = [open_model(str(tmp_path / name)) for name in ("gpu", "host")]
    losses = [evaluate(model, str(data), 64).loss for model in opened]
    assert losses[0] == losses[1]
    assert isinstance(opened[1].model.get_input_embeddings(), HostTable)


@pytest.mark.full
def test_a_table_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the device: what is predicted for a GPU, in bf16, is the table less at its peak of loading."""
    monkeypatch.setattr("moetune.tensor_files._BLOCK", 2**12)
    model = small.write_model(tmp_path / "model", tie_word_embeddings=False, vocab_size=4096)
    predicted = list[int]()
    for settings in ({}, HOST):
        config = small.run_config(model, tmp_path, tmp_path / "out", "lora", model=settings)
        with Tracker({}) as tracker:
            table = build(config, "cpu").model.get_input_embeddings().weight
        assert torch.equal(table, load_file(model / "model.safetensors")["model.embed_tokens.weight"])
        load = trace(config).load
        assert load is not None
        predicted.append(load.gpu)
    assert predicted[0] - predicted[1] == 2 * table.numel()
    on_host = [block.bytes for block in tracker.log.blocks if block.on_host]
    assert on_host.count(table.nbytes) == 1
    assert sum(on_host) == table.nbytes


def test_a_table_in_several_tensors_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers writes Qwen3.8's of n-grams; nothing of half its size is allocated beside it."""
    monkeypatch.setattr("moetune.tensor_files._BLOCK", 2**8)
    settings = SETTINGS["qwen4_exp_text"] | {"split_ngram_parts": 11, "ngram_vocab_size_base": 5000}
    plain = toy_model("qwen4_exp_text", **settings)
    plain.save_pretrained(tmp_path)
    model = HOST | {"weights": "pretrained", "base": "fp32"}
    run = resolve(toy_run(tmp_path, "qwen4_exp_text", {"router": "all"}, model=model), "cpu")
    with Tracker({}) as tracker:
        built = build_resolved(run, "cpu").model.eval()
    table = built.get_submodule(TABLES["qwen4_exp_text"][0]).weight
    assert [block.bytes for block in tracker.log.blocks if 2 * block.bytes >= table.nbytes] == [table.nbytes]
    ids = token_ids()
    assert torch.equal(built(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits)


def test_a_prediction_has_the_table_on_the_host(tmp_path: Path) -> None:
    folder = write_toy(tmp_path, "mixtral", vocab_size=32768, tie_word_embeddings=False)
    runs = [resolve(toy_run(folder, "mixtral", {"router": "all"}, model=model), "cuda") for model in ({}, HOST)]
    gpu, host = (predict_memory(run, gpu=find_gpu("44GiB")) for run in runs)
    table, rows, ids = 32768 * 64 * 4, 2 * 32 * 64 * 4, 2 * 32 * 8
    of_gpu, of_host = gpu.ranks[0], host.ranks[0]
    assert of_gpu.parts.frozen_weights - of_host.parts.frozen_weights == table
    assert of_gpu.host_bytes < 1024
    assert of_host.host_bytes == table + rows + ids
    assert "embed_tokens on the host" in dict(host.about)["base"]


def test_what_shards_does_not_see_it(tmp_path: Path) -> None:
    """FSDP2 would move it to the GPU, as all buffers."""
    model = build_toy(toy_config("mixtral"), tmp_path, {"router": "all"}, model=HOST | {"experts_on": "host"}).model
    expected = {name: tensor for name, tensor in model.named_buffers() if stays_on_host(tensor)}
    assert {name.rpartition(".")[2] for name in expected} > {"weight", "data"}
    with without_host_tensors(model.modules()):
        assert not any(stays_on_host(tensor) for tensor in model.buffers())
    found = {name: tensor for name, tensor in model.named_buffers() if stays_on_host(tensor)}
    assert found.keys() == expected.keys()
    assert all(found[name] is expected[name] for name in found)


@pytest.mark.full
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"fsdp": 2}, {"replicate": 2}])
def test_over_ranks(parallel: dict[str, Any], model: Path, data: Path, tmp_path: Path) -> None:
    for name, settings in (("gpu", {}), ("host", HOST)):
        sections = {"hardware": {"count": 2}, "train": {"accumulate": 2}} if "fsdp" in parallel else {}
        config = pipelines.config_of(model, data, tmp_path / name, "lora", parallel, 2, **sections)
        pipelines.run(config.but(model=settings))
    lines = [small.read_metrics(tmp_path / name) for name in ("gpu", "host")]
    gpu, host = ([one["loss"] for one in of_run if "loss" in one] for of_run in lines)
    assert gpu == host


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"adapt": {"also": ["embedding"]}}, r"embeddings_on: host: .*model\.embed_tokens: it trains"),
        ({"tied": True}, r"embeddings_on: host: .*model\.embed_tokens: it is tied to the LM head"),
        ({"parallel": {"engine": "deepspeed", "fsdp": 2}}, r"embeddings_on: host: not tried with DeepSpeed"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_toy(tmp_path, "mixtral", tie_word_embeddings=sections.pop("tied", False))
    adapt = sections.pop("adapt", {"router": "all"})
    with pytest.raises(UserError, match=message):
        resolve(toy_run(folder, "mixtral", adapt, model=HOST, **sections), "cpu")
