"""Checkpoints are packed as they are read: the same bytes as packing the whole model, whatever their layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moetune.adapt.weights.quantizer import MoetuneConfig
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.quantized import QuantizedExperts
from tests.reference import run_config, small_linears_are_packed
from tests.resolved import build
from tests.toys import toy_config

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


def packed_of(weight: torch.Tensor, base: str) -> dict[str, torch.Tensor]:
    """One matrix, packed by itself."""
    stack = QuantizedExperts(1, tuple(weight.shape), base)
    stack.quantize_(0, weight.to(torch.float32))
    return {name: buffer[0] for name, buffer in stack.named_buffers() if name != "nested_code"}


def assert_packed(bank: ExpertBank, experts: torch.nn.Module, base: str) -> None:
    shape = bank.expert_shape
    for expert in range(shape.num_experts):
        for stack, name in ((bank.gate_up, "gate_up_proj"), (bank.down, "down_proj")):
            weight = getattr(experts, name)[expert].detach()
            for buffer, expected in packed_of(weight.T if shape.is_transposed else weight, base).items():
                assert getattr(stack, buffer)[expert].equal(expected), (name, expert, buffer)


@pytest.mark.parametrize("base", ["nf4", "fp32"])
@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_read_equals_packing_the_reference(model_type: str, base: str, tmp_path: Path) -> None:
    model = write(tmp_path, model_type)
    adapted = build(run_config(tmp_path, FROZEN, model={"weights": "pretrained", "base": base}), "cpu")
    banks = [(name, m) for name, m in adapted.model.named_modules() if isinstance(m, ExpertBank)]
    assert banks
    for name, bank in banks:
        assert_packed(bank, model.get_submodule(name), base)
    mine = dict(adapted.model.named_parameters())
    for name, parameter in model.named_parameters():
        if ".experts." not in name and mine[name].dtype == torch.float32:
            assert mine[name].equal(parameter), name


@pytest.mark.parametrize("layout", ["sharded", "fused", "sharded and fused"])
def test_layouts_of_a_checkpoint(layout: str, tmp_path: Path) -> None:
    """Shards with an index, and the names that transformers 5 has in memory."""
    options = {"max_shard_size": "20KB"} if "sharded" in layout else {}
    model = write(tmp_path, "mixtral", save_original_format="fused" not in layout, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "sharded" not in layout
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert any("gate_up_proj" in name for name in names) is ("fused" in layout)
    adapted = build(run_config(tmp_path, FROZEN, model={"weights": "pretrained"}), "cpu")
    for name, module in adapted.model.named_modules():
        if isinstance(module, ExpertBank):
            assert_packed(module, model.get_submodule(name), "nf4")


def test_what_trains_is_read_in_full(tmp_path: Path) -> None:
    model = write(tmp_path, "mixtral")
    adapt = {"experts": {"layers": "1", "ids": [2]}, "router": "all"}
    adapted = build(run_config(tmp_path, adapt, model={"weights": "pretrained"}), "cpu")
    expert = adapted.model.model.layers[1].mlp.experts.trained["2"]
    assert expert.gate_up.weight.equal(model.model.layers[1].mlp.experts.gate_up_proj[2])
    assert expert.down.weight.equal(model.model.layers[1].mlp.experts.down_proj[2])


def test_from_pretrained_by_itself(tmp_path: Path) -> None:
    """Without a run file: everything frozen, and logits of an unpacked base equal the plain model's."""
    model = write(tmp_path, "qwen2_moe").eval()
    ids = torch.arange(12)[None]
    for base, tolerance in (("fp32", 1e-5), ("nf4", 0.5)):
        with small_linears_are_packed():
            loaded = AutoModelForCausalLM.from_pretrained(
                tmp_path, quantization_config=MoetuneConfig(base=base), dtype=torch.float32, device_map={"": "cpu"}
            ).eval()
        assert any(isinstance(module, ExpertBank) for module in loaded.modules())
        with torch.no_grad():
            difference = (loaded(ids).logits - model(ids).logits).norm() / model(ids).logits.norm()
        assert 0 <= difference < tolerance, base


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"), "missing .*down_proj of expert 3"),
        (
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.1.w2.weight": torch.zeros(3, 3)}),
            r"down_proj of expert 1 is \[1, 3, 3\]",
        ),
        (
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.1.w1.weight": torch.zeros(3, 3)}),
            "gate_up_proj, expert 1",
        ),
        (
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.9.w2.weight": torch.zeros(32, 64)}),
            "unexpected expert 9",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(5, 32)}),
            r"q_proj.weight is \[5, 32\], not",
        ),
    ],
    ids=["missing", "other shape", "halves that do not fit", "extra", "linear of another shape"],
)
def test_a_checkpoint_with_a_wrong_expert_is_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=message), small_linears_are_packed():
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=MoetuneConfig(), ignore_mismatched_sizes=True
        )
    with small_linears_are_packed(), pytest.raises(UserError, match=message):
        build(run_config(tmp_path, FROZEN, model={"weights": "pretrained"}), "cpu")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        build(run_config(tmp_path, FROZEN, model={"weights": "pretrained"}), "cpu")


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    seen: list[float] = []
    build(run_config(tmp_path, FROZEN, model={"weights": "pretrained"}), "cpu", on_read=seen.append)
    assert seen == sorted(seen)
    assert 0.5 < seen[-2] <= seen[-1] == 1


def test_the_configuration_says_how_it_was_packed(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoetuneConfig(base="int8"))
    assert loaded.config.quantization_config.to_dict() == {
        "quant_method": "moetune", "base": "int8", "double_quant": True,
    }  # fmt: skip
    assert AutoConfig.from_pretrained(tmp_path).model_type == "mixtral"
