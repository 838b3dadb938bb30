"""A base in more than one precision: each matrix is in its own, in memory, on disk and in what is predicted."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetune.errors import UserError
from moetune.experts.quantized import QuantizedExperts
from moetune.memory.about import about
from moetune.models.quantized_manifest import read_quantized_manifest
from moetune.run.resolve import resolve
from tests.adapt.weights.test_published import write
from tests.adapt.weights.test_quantized_base import LORA, states
from tests.published import write_fp8
from tests.reference import next_token_loss, run_config, small_linears_are_quantized, token_ids
from tests.resolved import build, write_quantized_base
from tests.toys import toy_model

BASE: dict[str, Any] = {
    "default": "nf4",
    "parts": {"attention": "int8"},
    "layers": {"1": "fp32", 2: {"experts": "int8"}},
}
STORED = {
    0: {"experts": "nf4", "attention": "int8", "dense_mlp": "nf4", "shared_experts": "nf4"},
    1: {"experts": "fp32", "attention": "fp32", "dense_mlp": "fp32", "shared_experts": "fp32"},
    2: {"experts": "int8", "attention": "int8", "dense_mlp": "nf4", "shared_experts": "nf4"},
    3: {"experts": "nf4", "attention": "int8", "dense_mlp": "nf4", "shared_experts": "nf4"},
}
"""What `BASE` says, written out: layer -> part -> storage."""
NAMES = {
    "experts": r"experts\.(gate_up|down)_proj",
    "attention": r"self_attn\.\w+_proj(_with_mqa)?\.weight",
    "dense_mlp": r"mlp\.(gate|up|down)_proj\.weight",
    "shared_experts": r"mlp\.shared_experts?\.\w+_proj\.weight",
}
ALSO = {"also": ["norm"]}


def rounded(weight: Tensor, storage: str) -> Tensor:
    """A matrix [out, in], or a stack of them, quantized and dequantized."""
    if weight.ndim == 3:
        return torch.stack([rounded(one, storage) for one in weight])
    stack = QuantizedExperts(1, (weight.shape[0], weight.shape[1]), storage)  # type: ignore[arg-type]
    stack.quantize_(0, weight)
    return stack.matrix(0, weight.dtype)


def write_loud(folder: Path, model_type: str) -> None:
    """A toy whose loss shows how its matrices are rounded."""
    model = toy_model(model_type)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.3)
    model.save_pretrained(folder)


@torch.no_grad()
def loss_of(model: Any) -> float:
    ids = token_ids(4, 16)
    return next_token_loss(model.eval()(input_ids=ids, use_cache=False).logits, ids).item()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v2", "gemma4_text"])
def test_the_loss_is_that_of_a_model_rounded_by_hand(model_type: str, tmp_path: Path) -> None:
    write_loud(tmp_path, model_type)
    by_hand = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    plain, touched = loss_of(by_hand), set()
    with torch.no_grad():
        for name, parameter in by_hand.named_parameters():
            for part, pattern in NAMES.items():
                if match := re.fullmatch(rf"model\.layers\.(\d)\.(?:\w+\.)?{pattern}|", name):
                    parameter.copy_(rounded(parameter, STORED[int(match[1])][part]))
                    touched.add(part)
    with small_linears_are_quantized():
        adapted = build(run_config(tmp_path, ALSO, model={"weights": "pretrained", "base": BASE}), "cpu")
    assert loss_of(adapted.model) == pytest.approx(loss_of(by_hand), rel=1e-6)
    assert abs(loss_of(by_hand) / plain - 1) > 3e-4
    assert (
        touched
        == {
            "mixtral": {"experts", "attention"},
            "qwen3_moe": {"experts", "attention"},
            "deepseek_v2": set(NAMES),  # layer 0 is dense
            "gemma4_text": {"experts", "attention", "dense_mlp"},
        }[model_type]
    )


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_on_disk_it_is_the_same(dtype: str, tmp_path: Path) -> None:
    """And `base: auto` reads it as it is."""
    base = {"default": "nf4", "parts": {"attention": "bf16"}, "layers": {"0": {"experts": "bf16"}}}
    write(tmp_path / "plain", "qwen2_moe")
    with small_linears_are_quantized():
        write_quantized_base(str(tmp_path / "plain"), tmp_path / "packed", base, True)
    manifest = read_quantized_manifest(tmp_path / "packed")
    assert manifest is not None
    assert str(manifest.base) == "nf4; bf16 (attention); bf16 (layer 0, experts)"
    expected = states(tmp_path / "plain", base=base, dtype=dtype)
    same = {"default": "nf4", "layers": {0: {"experts": "bf16", "attention": "bf16"}, "1-3": {"attention": "bf16"}}}
    for how in ({}, {"base": same}, {"base": {"layers": same["layers"]}}):
        found = states(tmp_path / "packed", dtype=dtype, **how)
        assert found.keys() == expected.keys()
        assert all(found[key].equal(tensor) and found[key].dtype == tensor.dtype for key, tensor in expected.items())
    with pytest.raises(UserError, match=r"model\.base: nf4, but .* is quantized with nf4; bf16 \(attention\)"):
        states(tmp_path / "packed", base="nf4", dtype=dtype)


def test_of_a_published_format_some_is_kept_and_some_is_quantized_anew(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path, "qwen3_moe", left_out=["self_attn.o_proj"], num_hidden_layers=3)
    config = run_config(folder, ALSO, model={"weights": "pretrained", "base": {"layers": {0: "bf16", 1: "nf4"}}})
    with small_linears_are_quantized():
        adapted, whole = build(config, "cpu"), states(folder)
    banks = [adapted.model.get_submodule(f"model.layers.{layer}.mlp.experts") for layer in range(3)]
    assert [bank.gate_up.storage for bank in banks] == ["bf16", "nf4", "fp8"]
    for name, tensor in banks[2].down.named_buffers():
        assert tensor.equal(whole[f"model.layers.2.mlp.experts.down.{name}"])
    linears = adapted.run.quantized_linears
    assert {path.split(".")[2] for path in linears if path.endswith("o_proj")} == {"0", "1"}
    assert {storage for path, storage in linears.items() if ".2." in path} == {"fp8"}
    base = {"layers": {"0": "bf16", "1": "nf4"}}
    with small_linears_are_quantized():
        write_quantized_base(str(folder), tmp_path / "packed", base, True)
    found, expected = (states(where, base=base, dtype="bf16") for where in (tmp_path / "packed", folder))
    assert found.keys() == expected.keys()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ({"layers": {"2-5": "bf16"}}, r"model\.base\.layers: 4-5, and the model has the layers 0-3"),
        (
            {"parts": {"shared_experts": "bf16"}},
            r"model\.base\.parts: there are no shared_experts; there are .*experts",
        ),
        ({"layers": {1: {"dense_mlp": "bf16"}}}, r"model\.base\.layers\.1: there are no dense_mlp; there are"),
        ({"parts": {"attention": "mxfp4"}}, r"model\.base\.parts\.attention: mxfp4 is a format of experts alone"),
        ({"layers": {0: "fp32"}}, r"model\.base: fp32 needs model\.dtype: fp32, not bf16"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(base: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    with pytest.raises(UserError, match=problem):
        resolve(run_config(tmp_path, LORA, model={"base": base, "dtype": "bf16"}), "cuda")


def test_a_report_says_it(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    config = run_config(
        tmp_path, LORA, model={"base": {"layers": {"0-1": {"experts": "bf16"}, 3: "bf16"}}, "dtype": "bf16"}
    )
    said = dict(about(resolve(config, "cuda"), (8, 9)))["base"]
    assert said == "nf4, double-quantized; bf16 (layers 0-1, experts); bf16 (layer 3)"
