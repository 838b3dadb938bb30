"""A quantized base on disk: the same model, bit for bit, and nothing of a damaged one is used."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetune.adapt.weights import quantized_base
from moetune.atomic import aside_of
from moetune.errors import UserError
from moetune.experts.quantized import QuantizedExperts
from moetune.files import Ledger
from moetune.models.hub.fingerprint import digest, take_fingerprint
from moetune.models.quantized_manifest import read_quantized_manifest
from moetune.models.source import find_model_source
from tests.adapt.weights.test_published import write
from tests.reference import run_config, small_linears_are_quantized
from tests.resolved import build, write_quantized_base

LORA: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}, "router": "all"}
Run = Callable[..., Any]


def states(folder: Path, **model: Any) -> dict[str, torch.Tensor]:
    with small_linears_are_quantized():
        return build(run_config(folder, LORA, model={"weights": "pretrained", **model}), "cpu").model.state_dict()


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("model_type", "base"),
    [
        ("mixtral", "nf4"),
        ("qwen2_moe", "int8"),
        ("deepseek_v2", "nf4"),
        ("deepseek_v3", "int8"),  # keeps its correction biases in float32
        ("gpt_oss", "nf4"),
        ("gpt_oss", "int8"),
        ("gemma4_text", "nf4"),  # a buffer that is computed beside a weight that is read
    ],
)
def test_it_is_the_model_that_quantizing_gives(model_type: str, base: str, tmp_path: Path) -> None:
    """Wherever the experts are."""
    write(tmp_path / "plain", model_type)
    with small_linears_are_quantized():
        write_quantized_base(str(tmp_path / "plain"), tmp_path / "packed", base, True)
    expected = states(tmp_path / "plain", base=base, dtype="bf16")
    for name, experts_on in (("packed", "gpu"), ("packed", "host"), ("plain", "host")):
        found = states(tmp_path / name, base=base, dtype="bf16", experts_on=experts_on)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype, key
            assert found[key].equal(tensor), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_packed_keeps_its_values_and_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """On disk all of it; in a model that computes in that dtype too."""
    model = write(tmp_path / "plain", "gpt_oss").to(dtype)
    model.save_pretrained(tmp_path / "plain")
    with small_linears_are_quantized():
        write_quantized_base(str(tmp_path / "plain"), tmp_path / "packed", "nf4", True)
    source, rest = (load_file(tmp_path / file) for file in ("plain/model.safetensors", "packed/rest.safetensors"))
    packed = {name.partition(".weight.")[0] + ".weight" for name in rest if ".weight." in name}
    plain = {name for name in rest if ".weight." not in name} - packed
    assert plain == {name for name in source if ".experts." not in name} - packed
    assert {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.router.weight",
    } <= plain
    for name in plain:
        assert rest[name].dtype == dtype, name
        assert rest[name].equal(source[name]), name
    read = {k.replace(".base_layer", ""): v for k, v in states(tmp_path / "packed", dtype="fp32").items()}
    assert all(read[name].equal(source[name].float()) for name in plain)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("base", ["nf4", "int8", "mxfp4", "bf16"])
@pytest.mark.parametrize(
    ("dtype", "stored"), [("fp32", torch.float32), ("bf16", torch.float32), ("fp32", torch.float64)]
)
def test_a_checkpoint_is_quantized_from_its_own_values(
    base: str, dtype: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """Not from values rounded to bf16: by a run in either dtype, and by what is written once for both."""
    model = write(tmp_path / "plain", "mixtral").float()
    model.to(stored).save_pretrained(tmp_path / "plain")
    found = states(tmp_path / "plain", base=base, dtype=dtype)
    experts = model.get_submodule("model.layers.0.mlp.experts").down_proj.float()
    stack = QuantizedExperts(len(experts), tuple(experts.shape[1:]), base)
    rounded = QuantizedExperts(len(experts), tuple(experts.shape[1:]), base)
    for number, weight in enumerate(experts.detach()):
        stack.quantize_(number, weight)
        rounded.quantize_(number, weight.bfloat16())
    prefix = next(key for key in found if key.endswith("layers.0.mlp.experts.down.data")).removesuffix("data")
    for name, expected in stack.named_buffers():
        assert found[prefix + name].equal(expected), name
    assert base == "bf16" or any(not b.equal(stack.get_buffer(name)) for name, b in rounded.named_buffers())
    if base != "bf16":
        with small_linears_are_quantized():
            write_quantized_base(str(tmp_path / "plain"), tmp_path / "packed", base, True)
        read = states(tmp_path / "packed", base=base, dtype=dtype)
        assert read.keys() == found.keys()
        assert all(read[key].equal(tensor) for key, tensor in found.items())


def test_writing_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "plain", "mixtral")
    packed, written = tmp_path / "packed", []
    write_bank = quantized_base.write_bank

    def stops(folder: Path, path: str, bank: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write_bank(folder, path, bank)

    monkeypatch.setattr(quantized_base, "write_bank", stops)
    with pytest.raises(KeyboardInterrupt):
        write_quantized_base(str(tmp_path / "plain"), packed, "nf4", True)
    assert not packed.exists()
    begun = aside_of(packed) / "new"
    first = {file.name: file.stat().st_mtime_ns for file in begun.glob("*.safetensors")}
    assert len(first) == 2
    (begun / ".tmpx12").write_bytes(b"half")  # as a killed safetensors leaves it
    with pytest.raises(UserError, match="begun with another model, other data or settings"):
        write_quantized_base(str(tmp_path / "plain"), packed, "int8", True)
    source = tmp_path / "plain" / "model.safetensors"
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    os.utime(source)
    with pytest.raises(UserError, match="begun with another model, other data or settings"):
        write_quantized_base(str(tmp_path / "plain"), packed, "nf4", True)
    os.utime(source, ns=times)
    monkeypatch.setattr(quantized_base, "write_bank", write_bank)
    write_quantized_base(str(tmp_path / "plain"), packed, "nf4", True)
    assert {name: (packed / name).stat().st_mtime_ns for name in first} == first
    write_quantized_base(str(tmp_path / "plain"), tmp_path / "at once", "nf4", True)
    assert read_quantized_manifest(packed) == read_quantized_manifest(tmp_path / "at once")
    assert sorted(os.listdir(packed)) == sorted(os.listdir(tmp_path / "at once"))
    for file in packed.iterdir():
        assert file.read_bytes() == (tmp_path / "at once" / file.name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["at once", "packed", "plain"]


def test_what_speaks_of_the_sources_own_files_stays_there(tmp_path: Path) -> None:
    write(tmp_path / "plain", "mixtral")
    for name in ("manifest.json", "model.safetensors.index.json", "tokenizer.json"):
        (tmp_path / "plain" / name).write_text('{"weight_map": {}}' if "index" in name else "{}")
    write_quantized_base(str(tmp_path / "plain"), tmp_path / "packed", "nf4", True)
    assert [f.name for f in sorted((tmp_path / "packed").glob("*.json"))] == [
        "config.json", "generation_config.json", "packed.json", "tokenizer.json",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write(folder / "plain", "mixtral")
    write_quantized_base(str(folder / "plain"), folder / "packed", "nf4", True)
    return folder / "packed"


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "rest"])
def test_a_damaged_one_is_refused_by_name(packed: Path, damage: str, tmp_path: Path) -> None:
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    victim = "rest.safetensors" if damage == "rest" else "model.layers.1.mlp.experts.safetensors"
    if damage == "truncate":
        (tmp_path / victim).write_bytes((tmp_path / victim).read_bytes()[:-8])
    elif damage == "flip":
        data = bytearray((tmp_path / victim).read_bytes())
        data[-9] ^= 1
        (tmp_path / victim).write_bytes(data)
    else:
        (tmp_path / victim).unlink()
    with pytest.raises(UserError, match=victim):
        states(tmp_path)


def test_a_scale_that_is_not_finite_is_named(packed: Path, tmp_path: Path) -> None:
    """Of a base that was written from such weights, when quantizing did not look for them."""
    shutil.copytree(packed, tmp_path / "base")
    file = tmp_path / "base" / "model.layers.1.mlp.experts.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down.nested_absmax"
    tensors[name][0] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    manifest = json.loads((packed / "packed.json").read_text())
    manifest["files"][file.name]["sha256"] = digest(file)
    (tmp_path / "base" / "packed.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"{file.name}': {name} holds values that are not finite"):
        states(tmp_path / "base")


@pytest.mark.parametrize("key", ["fingerprint", "files", "source"])
def test_a_manifest_that_lacks_something_is_named(packed: Path, key: str, tmp_path: Path) -> None:
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((packed / "packed.json").read_text())
    del manifest[key]
    (tmp_path / "packed.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"packed\.json' cannot be read: .*write it again with moetune quantize"):
        states(tmp_path)


def test_it_says_what_was_packed(packed: Path) -> None:
    """Also when it was written in two goes, which read only the rest of the source the second time."""
    manifest = read_quantized_manifest(packed)
    assert (manifest.source, manifest.original.name) == ((packed.parent / "plain").resolve(), "plain")
    assert manifest.original.fingerprint == take_fingerprint(packed.parent / "plain")


def test_it_serves_only_runs_that_it_can(packed: Path) -> None:
    with pytest.raises(UserError, match=r"model.base: int8, but .* is quantized with nf4"):
        states(packed, base="int8")
    with pytest.raises(UserError, match=r"model.double_quant: False, but"):
        states(packed, double_quant=False)
    experts = {"experts": {"ids": [0]}}
    with pytest.raises(UserError, match=r"adapt.experts: .* quantized experts only; .* need the original checkpoint"):
        build(run_config(packed, experts, model={"weights": "pretrained"}), "cpu")


def test_the_command(packed: Path, tmp_path: Path, moetune: Run) -> None:
    source, out = packed.parent / "plain", tmp_path / "out"
    ended = moetune("quantize", source, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    assert "bytes in" in ended.out
    assert moetune("quantize", source, "--out", out).code == 2
    assert "not empty" in moetune("quantize", source, "--out", out).err
    assert "mxfp8, nvfp4, mxfp4, int4-g32" in moetune("quantize", source, "--out", tmp_path / "x", "--base", "fp32").err
    assert "quantized already" in moetune("quantize", out, "--out", tmp_path / "x").err
    assert "download it first" in moetune("quantize", "mixtral-8x7b", "--out", tmp_path / "x").err
    assert not (tmp_path / "x").exists()


def test_overwriting_removes_what_the_ledger_lists(packed: Path, tmp_path: Path, moetune: Run) -> None:
    source, out = packed.parent / "plain", tmp_path / "out"
    assert moetune("quantize", source, "--out", out).code == 0
    listed = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()} - {".moetune"}
    assert (Ledger(out).kind, listed <= Ledger(out).paths) == ("quantized base", True)
    again = ("quantize", source, "--out", out, "--base", "int8")
    assert "--overwrite" in moetune(*again).err
    for mine in ("mine.safetensors", "notes/mine.txt"):
        (out / mine).parent.mkdir(exist_ok=True)
        (out / mine).write_text("mine")
        ended = moetune(*again, "--overwrite")
        assert (ended.code, mine in ended.err) == (2, True)
        assert read_quantized_manifest(out).base == "nf4"
        (out / mine).unlink()
    ended = moetune(*again, "--overwrite")
    assert (ended.code, ended.err) == (0, "")
    assert read_quantized_manifest(out).base == "int8"
    lacking = tmp_path / "lacking"
    shutil.copytree(source, lacking)
    weights = load_file(lacking / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    ended = moetune("quantize", lacking, "--out", out, "--overwrite")
    assert (ended.code, "model.norm.weight" in ended.err) == (2, True)
    assert read_quantized_manifest(out).base == "int8"  # a base is not removed for a checkpoint that is refused
    other = tmp_path / "other"
    other.mkdir()
    (other / "rest.safetensors").write_text("mine")
    ended = moetune("quantize", source, "--out", other, "--overwrite")
    assert (ended.code, "holds no quantized base" in ended.err) == (2, True)
    assert (other / "rest.safetensors").read_text() == "mine"


def test_the_command_takes_a_name(tmp_path: Path, moetune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the catalog, or of a model on the hub that is on this machine."""
    assert moetune("quantize", "tiny-mixtral", "--out", tmp_path / "named").code == 0
    cached = read_quantized_manifest(tmp_path / "named").source
    monkeypatch.setattr("moetune.models.source.downloaded", lambda hub_id: cached)
    monkeypatch.setattr("moetune.models.source.download", lambda hub_id: cached)
    settings = find_model_source("tiny-mixtral").config
    monkeypatch.setattr("moetune.models.source.AutoConfig.from_pretrained", lambda *a, **k: settings)
    monkeypatch.setattr("moetune.models.source.snapshot_download", lambda *a, **k: str(cached))
    assert moetune("quantize", "owner/tiny", "--out", tmp_path / "hub").code == 0
    assert read_quantized_manifest(tmp_path / "hub") == read_quantized_manifest(tmp_path / "named")
