"""Matrices as the publishing libraries packed them have those libraries' own values, to the bit, and are written back
as they were (scripts/make_published_values.py wrote the files)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetune.errors import UserError
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.source_quantization import SourceQuantization
from moetune.formats.table import FORMATS
from moetune.tensor_files import NAMES

FILES = sorted((Path(__file__).parent / "published").glob("*.safetensors"))


def cases() -> list[Any]:
    made = []
    for file in FILES:
        with safe_open(file, "pt") as opened:
            settings = json.loads(opened.metadata()["settings"])
            for name, how in settings.items():
                keys = [key for key in opened.keys() if key.startswith(f"{name}.")]  # noqa: SIM118 (no dict)
                parts = {key.removeprefix(f"{name}."): opened.get_tensor(key) for key in keys}
                made.append(pytest.param(how, parts.pop("expected"), parts, id=f"{file.stem}-{name}"))
    return made


def write(folder: Path, settings: dict[str, Any], parts: dict[str, Tensor]) -> Quantized:
    """A checkpoint of one matrix, opened."""
    (folder / "config.json").write_text(json.dumps({"text_config": {"quantization_config": settings}}))
    save_file({f"layers.0.ffn.x.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    (stored,) = open_checkpoint(folder).values()
    assert isinstance(stored, Quantized)
    return stored


def published(settings: dict[str, Any]) -> SourceQuantization:
    (how,) = filter(None, (format.published(settings["quant_method"], settings) for format in FORMATS.values()))
    return how


@pytest.mark.parametrize(("settings", "expected", "parts"), cases())
def test_values_are_those_of_the_library(
    settings: dict[str, Any], expected: Tensor, parts: dict[str, Tensor], tmp_path: Path
) -> None:
    stored = replace(write(tmp_path, settings, parts), dtype=NAMES[expected.dtype])
    assert stored.shape == expected.shape
    assert torch.equal(stored.rows(), expected)
    assert torch.equal(stored.rows(1, 5), expected[1:5])
    base = published(settings).base
    assert base is not None
    assert stored.is_in(FORMATS[base])
    stack = QuantizedExperts(2, tuple(expected.shape), base)
    stack.quantize_(0, torch.randn(expected.shape))
    stack.put_quantized_(1, stored.quantized())
    assert torch.equal(stack.matrix(1, expected.dtype), expected)
    assert torch.equal(stack.matrix(1, torch.float32).to(expected.dtype), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("settings", "expected", "parts"), cases())
def test_a_matrix_that_does_not_change_is_written_back_as_it_was(
    settings: dict[str, Any], expected: Tensor, parts: dict[str, Tensor], tmp_path: Path
) -> None:
    """And one of which a weight changes, beyond what its scale allows too, changes nowhere else."""
    stored = replace(write(tmp_path, settings, parts), dtype=NAMES[expected.dtype])
    format = FORMATS[published(settings).base or "nf4"]

    def written(weight: Tensor) -> dict[str, Tensor]:
        before = stored.stored()
        rows = stored.as_rows(before)
        format.quantize(weight, rows, keep=True)
        return {
            name: tensor.reshape(stored.parts[name].shape) for name, tensor in (before | stored.as_parts(rows)).items()
        }

    stock = stored.stored()
    assert all(torch.equal(tensor, stock[name]) for name, tensor in written(expected.float()).items())
    weight = expected.float()
    weight[2, 3] = 3 * weight[2].abs().max() + 1
    changed = written(weight)
    save = {stored.parts[name].name: tensor.contiguous() for name, tensor in changed.items()}
    save_file(save, tmp_path / "model.safetensors")
    (after,) = open_checkpoint(tmp_path).values()
    rows = replace(after, dtype=NAMES[expected.dtype]).rows()
    assert float(rows[2, 3]) == pytest.approx(float(weight[2, 3]), rel=0.2)
    if format.name not in ("fp8", "fp8-tensor"):  # of which a scale is for more than a row
        others = torch.arange(len(expected)) != 2
        assert torch.equal(rows[others], expected[others])


def test_powers_of_two_for_blocks_of_rows_are_not_rounded_otherwise(tmp_path: Path) -> None:
    """Of which DeepSeek-V4 has them, and moetune's own quantization has not."""
    parts = {"weight": torch.ones(128, 128).to(torch.float8_e4m3fn), "scale": torch.ones(1, 1).to(torch.float8_e8m0fnu)}
    stored = write(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]}, parts)
    rows = stored.as_rows(stored.stored())
    FORMATS["fp8"].quantize(torch.full((128, 128), 1000.0), rows, keep=True)
    with pytest.raises(UserError, match=r"--into: .*x.scale holds powers of two"):
        stored.as_parts(rows)


def test_settings_of_other_layouts_are_not_taken_for_int4() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    packed = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    group: Any = packed["config_groups"]
    others: list[tuple[str, dict[str, Any]]] = [
        ("compressed-tensors", packed | {"config_groups": {"x": {"weights": weights | {"num_bits": 8}}}}),
        ("compressed-tensors", packed | {"config_groups": {"x": {"weights": weights | {"actorder": "group"}}}}),
        ("compressed-tensors", packed | {"config_groups": group | {"x": {"weights": weights | {"group_size": 64}}}}),
        ("compressed-tensors", packed | {"config_groups": {"x": {"weights": weights | {"group_size": 48}}}}),
        ("gptq", {"bits": 8, "group_size": 128}),
        ("gptq", {"bits": 4, "group_size": 128, "checkpoint_format": "marlin"}),
        ("gptq", {"bits": 4, "group_size": 128, "dynamic": {"+:.*down.*": {"bits": 8}}}),
        ("awq", {"bits": 4, "group_size": 128, "version": "gemv"}),
        ("auto-round", {"bits": 4, "group_size": 128, "data_type": "mx_fp"}),
        ("auto-round", {"bits": 4, "group_size": 128, "extra_config": {"lm_head": {"bits": 8}}}),
        ("auto-round", {"bits": 4, "group_size": 128, "extra_config": {"lm_head": {"data_type": "mx_fp"}}}),
        ("compressed-tensors", packed | {"config_groups": {"x": {"weights": weights | {"actorder": True}}}}),
        ("compressed-tensors", packed | {"config_groups": {"x": {"weights": weights, "format": "marlin-24"}}}),
        ("compressed-tensors", packed | {"format": "nvfp4-pack-quantized"}),
        ("compressed-tensors", packed | {"format": "mxfp4-pack-quantized"}),
        ("awq", {"bits": 4, "group_size": 128, "version": "gemm", "format": "gemv_fast"}),
        ("awq", {"bits": 4, "group_size": 128, "backend": "llm-awq"}),
        ("fp8", {"fmt": "e5m2"}),
    ]
    for method, settings in others:
        assert not any(format.published(method, settings) for format in FORMATS.values()), (method, settings)
    with pytest.raises(UserError, match="config_groups"):
        FORMATS["int4-g32"].published("compressed-tensors", packed | {"config_groups": {"x": {"weights": 4}}})


@pytest.mark.parametrize(
    ("settings", "left_out", "kept"),
    [
        (
            {"quant_method": "gptq", "dynamic": {"-:.*attn.*": {}}},
            "model.layers.0.self_attn.q_proj",
            "model.mlp.up_proj",
        ),
        (
            {"quant_method": "gptq", "modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.down_proj"]]},
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.mlp.down_proj",
        ),
        (
            {"quant_method": "auto-round", "extra_config": {".*self_attn.*": {"bits": 16}}},
            "a.self_attn.q_proj",
            "a.mlp",
        ),
        ({"quant_method": "awq", "modules_to_not_convert": ["q_proj"]}, "model.self_attn.q_proj", "model.mlp"),
        ({"quant_method": "awq", "modules_to_not_convert": ["self_attn"]}, "model.0.self_attn.q_proj", "model.mlp"),
    ],
)
def test_modules_in_16_bits(settings: dict[str, Any], left_out: str, kept: str) -> None:
    how = published({"bits": 4, "group_size": 128, **settings})
    assert how.base == "int4-g128"
    assert how.leaves_out(how.base, left_out)
    assert not how.leaves_out(how.base, kept)


@pytest.mark.parametrize(
    ("format", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ],
)
def test_targets_of_compressed_tensors(format: str, weights: dict[str, Any]) -> None:
    """Of every format; a class of layers is all."""
    for targets, is_left_out in ((["re:.*experts.*"], True), (["re:.*experts.*", "Linear"], False)):
        group = {"targets": targets, "weights": weights, "format": format}
        how = published({"quant_method": "compressed-tensors", "config_groups": {"x": group}})
        assert how.leaves_out(how.base, "model.layers.0.self_attn.q_proj") == is_left_out
