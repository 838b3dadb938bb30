"""Checkpoints that transformers alone loads: what is not finite in them is named as the files name it."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetune.adapt.weights.stock import load_stock
from moetune.config.schema import ModelConfig, RunConfig
from moetune.errors import UserError
from moetune.run.resolve import resolve_model
from tests.resolved import build
from tests.toys import toy_model


def test_a_value_that_is_not_finite_is_named(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((small_model / "config.json").read_bytes())
    tensors = load_file(small_model / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    tensors[name][0, 0] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = resolve_model(ModelConfig.named(str(tmp_path), dtype="bf16"), "cpu")
    with pytest.raises(UserError, match=rf"model\.safetensors': {name} holds values that are not finite"):
        load_stock(model, "cpu")


def test_a_correction_bias_is_not_rounded(tmp_path: Path) -> None:
    """Near 8, bfloat16 has steps of 1/16: read so, experts of like scores would change places."""
    model = toy_model("minimax_m2")
    biases = {name: b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.copy_(8 + torch.rand(len(bias)) / 16)
    model.save_pretrained(tmp_path)
    config = RunConfig.model_validate({"model": {"path": str(tmp_path), "dtype": "bf16"}, "adapt": {"router": "all"}})
    loaded = load_stock(resolve_model(config.model, "cpu"), "cpu"), build(config, "cpu").model
    assert biases
    for name, bias in biases.items():
        assert all(torch.equal(model.get_buffer(name), bias) for model in loaded)
