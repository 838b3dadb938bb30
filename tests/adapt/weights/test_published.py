"""A checkpoint is quantized as it is read: the same bytes as quantizing the whole model, whatever its layout."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from moetune.adapt.weights.stock import load_stock
from moetune.config.schema import ModelConfig
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.quantized import QuantizedExperts
from moetune.run.resolve import resolve_model
from tests.reference import run_config, small_linears_are_quantized
from tests.resolved import build, write_quantized_base
from tests.toys import LAYERS, toy_config

TYPES = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "granitemoe", "gpt_oss", "phimoe"]
FROZEN: dict[str, Any] = {"also": ["norm"]}


def write(folder: Path, model_type: str, **options: Any) -> PreTrainedModel:
    """A toy in the hub's format; returns the model in memory."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(toy_config(model_type)).to(torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, **options)
    return model


def read(folder: Path, adapt: dict[str, Any] | None = None, base: str = "nf4", on_read: Any = None) -> nn.Module:
    config = run_config(folder, adapt or FROZEN, model={"weights": "pretrained", "base": base})
    return build(config, "cpu", on_read=on_read).model


def quantized(weight: Tensor, base: str) -> dict[str, Tensor]:
    """One matrix, quantized by itself."""
    stack = QuantizedExperts(1, tuple(weight.shape), base)
    stack.quantize_(0, weight.to(torch.float32))
    return {name: buffer[0] for name, buffer in stack.named_buffers() if name != "nested_code"}


def assert_quantized(model: nn.Module, plain: nn.Module, base: str) -> None:
    banks = {name: module for name, module in model.named_modules() if isinstance(module, ExpertBank)}
    assert banks
    for path, bank in banks.items():
        shape = bank.expert_shape
        for expert in range(shape.num_experts):
            for stack, name in ((bank.gate_up, "gate_up_proj"), (bank.down, "down_proj")):
                weight = getattr(plain.get_submodule(path), name)[expert].detach()
                for buffer, expected in quantized(weight.T if shape.is_transposed else weight, base).items():
                    assert getattr(stack, buffer)[expert].equal(expected), (path, name, expert, buffer)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("base", ["nf4", "fp32"])
@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_read_equals_quantizing_the_model_in_memory(model_type: str, base: str, tmp_path: Path) -> None:
    plain = write(tmp_path, model_type)
    model = read(tmp_path, base=base)
    assert_quantized(model, plain, base)
    mine = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if ".experts." not in name and mine[name].dtype == torch.float32:
            assert mine[name].equal(parameter), name


@pytest.mark.parametrize("layout", ["sharded", "fused", "sharded and fused"])
def test_layouts_of_a_checkpoint(layout: str, tmp_path: Path) -> None:
    """Shards with an index, and the names that transformers 5 has in memory."""
    options = {"max_shard_size": "20KB"} if "sharded" in layout else {}
    plain = write(tmp_path, "mixtral", save_original_format="fused" not in layout, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "sharded" not in layout
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert any("gate_up_proj" in name for name in names) is ("fused" in layout)
    assert_quantized(read(tmp_path), plain, "nf4")


def test_what_trains_is_read_in_full(tmp_path: Path) -> None:
    plain: Any = write(tmp_path, "mixtral")
    model: Any = read(tmp_path, {"experts": {"layers": "1", "ids": [2]}, "router": "all"})
    expert, stock = model.model.layers[1].mlp.experts.trained["2"], plain.model.layers[1].mlp.experts
    assert expert.gate_up.weight.equal(stock.gate_up_proj[2])
    assert expert.down.weight.equal(stock.down_proj[2])


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    seen: list[float] = []
    read(tmp_path, on_read=seen.append)
    assert seen == sorted(seen)
    assert 0.5 < seen[-2] <= seen[-1] == 1


# --- What can be wrong with a checkpoint ----------------------------------------------------------------------------

MOE = "block_sparse_moe.experts"


def without(pattern: str) -> Any:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if pattern in name]


def other(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


DAMAGE: dict[str, tuple[Any, str]] = {
    "missing": (without("model.norm.weight"), "missing model.norm.weight"),
    "unexpected": (other("model.layers.0.extra.weight", 2), "unexpected model.layers.0.extra.weight"),
    "twice": (
        other("model.layers.0.mlp.gate.weight", 8, 32),
        "missing model.layers.0.mlp.gate.weight (it is there in two spellings: remove one from the files)",
    ),
    "other shape": (other("lm_head.weight", 7, 32), "lm_head.weight is [7, 32], not [96, 32]"),
    "a linear": (other("model.layers.0.self_attn.q_proj.weight", 5, 32), "q_proj.weight is [5, 32], not [32, 32]"),
    "no weight": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.uint8)}),
        "model.norm.weight has type U8, which is not one of weights",
    ),
    "no experts in a layer": (without(f".1.{MOE}"), "missing model.layers.1.mlp.experts.down_proj"),
    "half an expert": (without(f"1.{MOE}.3.w1"), "missing model.layers.1.mlp.experts.gate_up_proj of expert 3"),
    "an expert too few": (without(f"1.{MOE}.3.w2"), "missing model.layers.1.mlp.experts.down_proj of expert 3"),
    "an expert of another shape": (
        other(f"model.layers.0.{MOE}.1.w2.weight", 3, 3),
        "model.layers.0.mlp.experts.down_proj of expert 1 is [1, 3, 3], not [1, 32, 48]",
    ),
    "halves that do not fit": (
        other(f"model.layers.0.{MOE}.1.w1.weight", 3, 3),
        "model.layers.0.mlp.experts.gate_up_proj, expert 1: ",
    ),
    "an expert too many": (
        other(f"model.layers.0.{MOE}.9.w2.weight", 32, 64),
        "unexpected expert 9 for model.layers.0.mlp.experts.down_proj, which has 8",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write(folder, "mixtral")
    return folder


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_one_that_does_not_fit_is_refused_by_name(
    change: Any, message: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weight is read."""
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("moetune.tensor_files.Stored.rows", lambda *_: pytest.fail("weights were read"))
    with small_linears_are_quantized(), pytest.raises(UserError, match=re.escape(message)):
        read(tmp_path)


def test_what_is_there_is_named_beside_what_is_missing(whole: Path, tmp_path: Path) -> None:
    """Where all names begin otherwise, as those of a value head's."""
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    tensors = {f"pretrained_model.{name}": tensor for name, tensor in load_file(whole / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with small_linears_are_quantized(), pytest.raises(UserError, match=r"missing lm_head.*unexpected pretrained_model"):
        read(tmp_path)


def test_a_file_that_was_cut_short_is_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    with pytest.raises(UserError, match="only safetensors checkpoints are read"):
        read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


def test_matrices_of_zeros_and_files_that_no_index_lists_are_said(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.safetensors").touch()
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    zeros = [name for name in sorted(tensors) if "experts.0." in name]
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in zeros}, tmp_path / "model.safetensors")
    read(tmp_path)
    said = capsys.readouterr().err
    assert f"only zeros in {len(zeros)} tensors of " in said
    assert "files of weights that are not read: other.safetensors" in said


def test_a_layer_that_predicts_further_tokens_is_left_out(whole: Path, tmp_path: Path) -> None:
    """It follows the last one, and has a projection of its own; transformers knows some by their numbers."""
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    tensors, last = load_file(whole / "model.safetensors"), f"model.layers.{LAYERS - 1}."
    further = {name.replace(last, f"model.layers.{LAYERS}."): x.clone() for name, x in tensors.items() if last in name}
    further[f"model.layers.{LAYERS}.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors | further, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stock = load_stock(resolve_model(ModelConfig.named(str(tmp_path)), "cpu"), "cpu").state_dict()
    with small_linears_are_quantized():
        assert read(tmp_path).state_dict().keys() >= {"model.norm.weight"}
    assert not any(f".layers.{LAYERS}." in name for name in stock)


def test_an_unknown_quantization_is_refused(whole: Path, tmp_path: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"already quantized \(aqlm\)"):
        read(tmp_path)


@pytest.mark.parametrize("way", ["whole", "base"])
def test_a_model_that_was_read_generates_as_its_authors_set_it(way: str, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "whole"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5], "temperature": 0.6, "do_sample": true}')
    if way == "base":
        write_quantized_base(str(folder), tmp_path / "base", "nf4", True)
        folder = tmp_path / "base"
    model: Any = read(folder)
    assert not model.training
    assert (model.generation_config.eos_token_id, model.generation_config.temperature) == ([3, 5], 0.6)
    assert model.config.name_or_path == str(folder)
