"""Checkpoints that transformers alone loads: what is not finite in them is named as the files name it."""

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moetune.adapt.weights.stock import load_stock
from moetune.config.schema import ModelConfig
from moetune.errors import UserError
from moetune.run.resolve import resolve_model


def test_a_value_that_is_not_finite_is_named(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((small_model / "config.json").read_bytes())
    tensors = load_file(small_model / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    tensors[name][0, 0] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = resolve_model(ModelConfig.named(str(tmp_path), dtype="bf16"), "cpu")
    with pytest.raises(UserError, match=rf"model\.safetensors': {name} holds values that are not finite"):
        load_stock(model, "cpu")
